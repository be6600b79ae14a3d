"""The few-shot benchmark: many questions behind one long shared prefix of worked examples.

Each arm serves the same prompts on a fresh engine over one model, in turn. The greedy tokens of all arms
must be equal before any speed is shown. Exit status: 0 all is well, 1 the gate (or the residue check)
failed or no model, 2 an option makes no sense.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from radixkv.bench.arm import Arm, parse_arms
from radixkv.bench.command import check_writable, exit_status, write_json
from radixkv.bench.comparison import Comparison, judge, run_interleaved, summarise
from radixkv.bench.harness import Settings, score_gaps
from radixkv.bench.machine import check_load, environment, load_average, usable_cores
from radixkv.bench.model_rig import DEFAULT_MODEL, open_rig
from radixkv.bench.plot import check_plotting, plot_result
from radixkv.bench.progress import Progress
from radixkv.bench.report import format_result
from radixkv.bench.residues import PAGE_SIZES, RESIDUE_TOKENS, cut_lengths, format_residues, run_residues
from radixkv.bench.rig import Rig
from radixkv.bench.whole_page_tree import WholePageTree
from radixkv.bench.workloads import Workload, arithmetic_workload, cut_prefix, gsm8k_workload, says_answer
from radixkv.kv.radix_tree import RadixTree

SCHEMA = 1
OpenRig = Callable[[argparse.Namespace], Rig]


def main(argv: Sequence[str] | None = None, *, make_rig: OpenRig | None = None) -> int:
    """Run the benchmark; ``make_rig`` stands in for the real model in tests."""
    options = _parser().parse_args(argv)
    return exit_status("few-shot", lambda: _run(options, make_rig or _open))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="radixkv bench few-shot",
        description=__doc__.partition("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default=DEFAULT_MODEL, help="hub id, folder, GGUF file or packaged name")
    add("--questions", type=int, default=32, metavar="N", help="requests, all submitted at once")
    add("--max-tokens", type=int, default=32, metavar="N", help="output tokens of each question")
    add("--arms", default="no-cache,radix", help="of no-cache, radix, fcfs, radix-pN, fcfs-pN, transformers")
    add("--repeats", type=int, default=1, metavar="N", help="runs of each arm, in turn")
    add("--page-size", type=int, default=16, metavar="N", help="tokens in a page, where the arm says none")
    add("--prefix-tokens", type=int, metavar="N", help="cut the shared prefix to N tokens")
    add("--seed", type=int, default=0, help="of the built-in word problems")
    add("--data", type=Path, metavar="FOLDER", help="GSM8K from FOLDER/gsm8k instead of built-in problems")
    add("--residues", action="store_true", help="only check hits with prefixes that end inside a page")
    add("--no-partial", action="store_true", help="for comparison: a tree that finds whole pages only")
    add("--max-batch-tokens", type=int, default=1024, metavar="N", help="tokens computed in one step")
    add("--max-running", type=int, default=64, metavar="N", help="requests that run at once")
    add("--peer-questions", type=int, default=4, metavar="N", help="questions of the transformers arm")
    add("--attention", default="cpu", metavar="NAME", help="backend: cpu, or reference, which is slow")
    add("--num-threads", type=int, metavar="N", help="default: all cores that this process may use")
    add("--record", action="store_true", help="refuse to run on a busy machine")
    add("--json", type=Path, metavar="FILE", help="write the result here too")
    add("--plot", type=Path, metavar="FILE", help="draw the result as a bar chart")
    return parser


def _open(options: argparse.Namespace) -> Rig:
    return open_rig(
        options.model,
        attention=options.attention,
        num_threads=options.num_threads,
        max_batch_tokens=options.max_batch_tokens,
        max_running=options.max_running,
    )


def _run(options: argparse.Namespace, make_rig: OpenRig) -> int:
    arms = parse_arms(options.arms, page_size=options.page_size)
    check_writable(options.json)
    check_writable(options.plot)
    if options.plot is not None:
        check_plotting(options.plot)
    load = load_average()
    warning = check_load(load, num_cores=usable_cores(), record=options.record)
    if warning:
        print(f"warning: {warning}", file=sys.stderr)
    rig = make_rig(options)
    workload = _workload(options, rig)
    if workload is None:
        print(f"skipped: {options.data} holds no gsm8k/fewshot_train_*.jsonl and gsm8k/test_*.jsonl")
        write_json(options.json, {"schema": SCHEMA, "skipped": f"no GSM8K in {options.data}"})
        return 0
    settings = Settings(
        max_batch_tokens=options.max_batch_tokens,
        max_running=options.max_running,
        make_tree=WholePageTree if options.no_partial else RadixTree,
    )
    about = {
        "schema": SCHEMA,
        "benchmark": "few-shot",
        "workload": _describe(workload),
        "partial_matches": not options.no_partial,
        "load_average": load,
        "environment": environment(num_threads=rig.num_threads, model=rig.name, model_digest=rig.digest),
        "load_s": rig.load_report,
    }
    print(_heading(workload, rig))
    if options.residues:
        return _residues(options, workload, rig, settings, about)
    return _compare(options, arms, workload, rig, settings, about)


def _workload(options: argparse.Namespace, rig: Rig) -> Workload | None:
    max_tokens = RESIDUE_TOKENS if options.residues else options.max_tokens
    sizes = {"num_questions": options.questions, "max_tokens": max_tokens}
    workload: Workload | None
    if options.data is not None:
        workload = gsm8k_workload(options.data, rig.encode, **sizes)
    else:
        workload = arithmetic_workload(rig.encode, seed=options.seed, **sizes)
    if workload is None or options.prefix_tokens is None:
        return workload
    return cut_prefix(workload, options.prefix_tokens)


def _compare(
    options: argparse.Namespace,
    arms: tuple[Arm, ...],
    workload: Workload,
    rig: Rig,
    settings: Settings,
    about: dict[str, Any],
) -> int:
    ours = sum(not arm.is_peer for arm in arms)
    with Progress(ours * options.repeats * workload.num_requests) as bar:
        runs = run_interleaved(
            arms,
            workload,
            rig,
            settings,
            repeats=options.repeats,
            num_peer_requests=options.peer_questions,
            on_finished=bar.tick,
        )
    comparison = judge(arms, workload, runs, lambda forks: score_gaps(forks, rig, settings))
    print(_equality_text(comparison))
    failed = comparison.equal_outputs is False
    floor = None
    if rig.measure_floor is not None and not failed:
        floor = rig.measure_floor(options.max_batch_tokens, min(workload.num_requests, options.max_running))
    result = about | summarise(comparison, floor)
    print(format_result(result))
    print(_answers_text(comparison, rig))
    print(_environment_text(result))
    write_json(options.json, result)
    if failed:
        print("the outputs differ: no speed is shown", file=sys.stderr)
        return 1
    if options.plot is not None:
        plot_result(result, options.plot)
        print(f"drawn to {options.plot}")
    return 0


def _residues(
    options: argparse.Namespace, workload: Workload, rig: Rig, settings: Settings, about: dict[str, Any]
) -> int:
    num_runs = sum(len(cut_lengths(size, len(workload.prefix_ids))) for size in PAGE_SIZES)
    with Progress(num_runs * workload.num_requests) as bar:
        residues = run_residues(workload, rig, settings, bar.tick)
    passed = all(residue.passed for residue in residues)
    print(format_residues(residues))
    print("every length reaches 99 % of the optimum" if passed else "not every length reaches 99 %")
    found = [residue.as_json() for residue in residues]
    write_json(options.json, about | {"residues": found, "passed": passed})
    return 0 if passed else 1


def _describe(workload: Workload) -> dict[str, Any]:
    return {
        "name": workload.name,
        "num_requests": workload.num_requests,
        "prefix_tokens": len(workload.prefix_ids),
        "prompt_tokens": workload.num_prompt_tokens,
        "max_tokens": workload.max_tokens,
    }


def _heading(workload: Workload, rig: Rig) -> str:
    return (
        f"{workload.name}: {workload.num_requests} questions behind a prefix of {len(workload.prefix_ids)} "
        f"tokens, {workload.max_tokens} tokens each, all submitted at once; {rig.name}"
    )


def _equality_text(comparison: Comparison) -> str:
    if not comparison.equalities:
        return "one run only: there is nothing that its outputs could be compared with"
    return "\n".join(equality.describe() for equality in comparison.equalities)


def _answers_text(comparison: Comparison, rig: Rig) -> str:
    outputs = comparison.runs[comparison.reference][0].outputs
    pairs = [
        (output, answer)
        for output, answer in zip(outputs, comparison.workload.answers, strict=False)
        if answer is not None
    ]
    right = sum(says_answer(rig.decode(output), answer) for output, answer in pairs)
    return (
        f"\nright answers: {right} of {len(pairs)} (a note, not a result: the model may be small and "
        f"{comparison.workload.max_tokens} tokens may not reach the answer)"
    )


def _environment_text(result: dict[str, Any]) -> str:
    about, load = result["environment"], result["load_average"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return (
        f"measured with {versions}; Python {about['python']}; threads: {about['num_threads']} on "
        f"{about['cpu']}, {about['usable_cores']} cores; commit {about['commit']}; "
        f"model sha256 {about['model_sha256']}; "
        f"load average before: {'unknown' if load is None else f'{load:.2f}'}"
    )


if __name__ == "__main__":
    sys.exit(main())
