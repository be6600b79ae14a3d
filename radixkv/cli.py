"""The ``radixkv`` command: ``generate``, ``bench``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from radixkv.errors import InvalidRequestError, RadixKVError

BENCHMARKS = {
    "few-shot": ("radixkv.bench.few_shot", "many questions behind one long prefix of worked examples"),
    "micro-tree": ("radixkv.bench.micro_tree", "match, insert and evict per second, by size"),
    "no-reuse": ("radixkv.bench.no_reuse", "unrelated prompts: what the cache costs where it cannot help"),
    "overhead": ("radixkv.bench.overhead", "requests per second of scheduler and ledger alone"),
}
"""Name to module (with ``main(argv) -> int``) and one line of help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, 1 after an error of ours (a model that cannot be loaded
    among them, whatever the command), 2 for wrong arguments, 130 after Ctrl-C. A benchmark also returns 1
    where it did not pass, and 2 where its options make no sense."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        if args[:1] == ["bench"] and len(args) > 1 and args[1] in BENCHMARKS:
            module = importlib.import_module(BENCHMARKS[args[1]][0])
            return int(module.main(args[2:]) or 0)
        return _generate(_parser().parse_args(args))
    except RadixKVError as error:
        print(f"radixkv: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("radixkv: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="radixkv", description="Runs language models and never computes the same prefix twice."
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    generate = commands.add_parser("generate", help="run prompts and print what the model writes")
    generate.add_argument("model", help="hub id, local folder, GGUF file or smollm2-135m-instruct")
    generate.add_argument("prompts", nargs="+", metavar="PROMPT")
    generate.add_argument(
        "--chat", action="store_true", help="put each prompt into the model's chat template"
    )
    generate.add_argument("--max-tokens", type=int, default=256, metavar="N")
    generate.add_argument("--temperature", type=float, default=0.0, metavar="T")
    generate.add_argument("--seed", type=int, default=None)
    generate.add_argument("--revision", default=None, help="branch, tag or commit of a hub id")
    generate.add_argument("--dtype", default="float32")
    generate.add_argument("--device", default="cpu")
    generate.add_argument("--num-tokens", type=int, default=None, help="size of the K/V store")
    generate.add_argument("--usage", action="store_true", help="print token counts to standard error")
    names = "\n".join(f"  {name:12} {text}" for name, (_, text) in BENCHMARKS.items())
    commands.add_parser(
        "bench",
        help="run a benchmark",
        description="Benchmarks; each has its own --help.",
        epilog=f"benchmarks:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).add_argument("name", choices=sorted(BENCHMARKS))
    return parser


def _generate(args: argparse.Namespace) -> int:
    from radixkv.llm import LLM
    from radixkv.prompts import with_index
    from radixkv.sampling import SamplingParams
    from radixkv.text import refuse_no_text

    for index, text in enumerate(args.prompts):  # before a model is loaded
        try:
            refuse_no_text(text)
        except InvalidRequestError as error:
            raise with_index(error, "prompt", index) from None
    sampling = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed)
    with LLM(
        args.model,
        revision=args.revision,
        dtype=args.dtype,
        device=args.device,
        num_tokens=args.num_tokens,
        attention="cpu" if args.device == "cpu" else "reference",
    ) as llm:
        prompts: list[str] | list[list[int]] = list(args.prompts)
        if args.chat:
            if llm.tokenizer is None:
                raise RadixKVError(f"{args.model} has no tokenizer, so no chat template")
            prompts = [
                llm.tokenizer.encode_chat([{"role": "user", "content": text}]).tolist()
                for text in args.prompts
            ]
        for output in llm.generate(prompts, sampling):
            print(output.text)
            if args.usage:
                usage = output.usage
                print(
                    f"prompt {usage.prompt_tokens} tokens ({usage.cached_tokens} cached), "
                    f"output {usage.completion_tokens}, {output.finish_reason}",
                    file=sys.stderr,
                )
    return 0


def _version() -> str:
    from importlib.metadata import version

    return f"radixkv {version('radixkv')}"
