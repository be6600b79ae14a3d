"""WordProblem: a small arithmetic story with worked steps and a known answer, made from a seed.

The text is plain English made of common words: random characters would tokenise about twice as long and
never merge at boundaries, which hides what the benchmarks are to show.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

NAMES = (
    "Alice", "Bruno", "Clara", "David", "Elena", "Frank", "Grace", "Henry", "Irene", "Jacob",
    "Karen", "Louis", "Maria", "Nathan", "Olivia", "Peter", "Quinn", "Rosa", "Samuel", "Teresa",
    "Ursula", "Victor", "Wendy", "Xavier", "Yusuf", "Zoe", "Arthur", "Bella", "Carlos", "Diana",
    "Edward", "Fiona", "George", "Hannah", "Isaac", "Julia", "Kevin", "Laura", "Martin", "Nina",
)  # fmt: skip
LEAD = "Question:"
"""Before every question, so the last part that all few-shot prompts share."""
_FRUITS = ("apples", "pears", "plums", "peaches", "lemons", "oranges")
_GOODS = ("candles", "notebooks", "postcards", "mugs", "scarves", "puzzles")
_PLACES = ("library", "school", "museum", "theatre", "harbour", "market")


@dataclass(frozen=True)
class WordProblem:
    """``question`` asks, ``working`` shows every step, ``answer`` is the number that they lead to."""

    question: str
    working: str
    answer: int


def as_example(problem: WordProblem) -> str:
    """The problem with its solution, as one worked example of a few-shot prompt."""
    return f"{LEAD}{as_question(problem)} {problem.working} The answer is {problem.answer}.\n\n"


def as_question(problem: WordProblem) -> str:
    """The problem with the solution left open, to stand after ``LEAD``."""
    return f" {problem.question}\nAnswer:"


def make_problems(num_problems: int, rng: random.Random) -> list[WordProblem]:
    """Each begins with a name of its own until the names run out, so that questions differ early."""
    problems: list[WordProblem] = []
    names: list[str] = []
    for number in range(num_problems):
        if not names:
            names = rng.sample(NAMES, len(NAMES))
        problems.append(_STORIES[number % len(_STORIES)](names.pop(), rng))
    return problems


def _orchard(name: str, rng: random.Random) -> WordProblem:
    fruit = rng.choice(_FRUITS)
    morning, afternoon, basket, friends = (
        rng.randint(3, 9),
        rng.randint(2, 8),
        rng.randint(12, 25),
        rng.randint(3, 7),
    )
    total = (morning + afternoon) * basket
    given = total % friends + friends * rng.randint(1, 4)
    return WordProblem(
        f"{name} fills {morning} baskets with {fruit} in the morning and {afternoon} baskets in the "
        f"afternoon. Every basket holds {basket} {fruit}. On the way home {name} gives {given} {fruit} to a "
        f"neighbour and then shares all the others equally among {friends} friends. How many {fruit} does "
        "each friend get?",
        f"There are {morning} + {afternoon} = {morning + afternoon} baskets, and they hold "
        f"{morning + afternoon} * {basket} = {total} {fruit}. After giving {given} away, {total} - {given} "
        f"= {total - given} {fruit} are left. Each friend gets {total - given} / {friends} = "
        f"{(total - given) // friends} {fruit}.",
        (total - given) // friends,
    )


def _stall(name: str, rng: random.Random) -> WordProblem:
    goods = rng.choice(_GOODS)
    made, price, broken, rent = (
        rng.randint(40, 90),
        rng.randint(3, 9),
        rng.randint(2, 12),
        rng.randint(15, 60),
    )
    income = (made - broken) * price
    return WordProblem(
        f"{name} makes {made} {goods} to sell at a stall by the {rng.choice(_PLACES)}. On the way {broken} "
        f"of them are damaged and cannot be sold. All the others are sold for {price} dollars each, and the "
        f"stall itself costs {rent} dollars for the day. How many dollars are left at the end of the day?",
        f"{made} - {broken} = {made - broken} {goods} can be sold. They bring in {made - broken} * {price} = "
        f"{income} dollars. After the stall is paid, {income} - {rent} = {income - rent} dollars are left.",
        income - rent,
    )


def _reading(name: str, rng: random.Random) -> WordProblem:
    first, factor, fewer, more = (
        rng.randint(14, 30),
        rng.randint(2, 3),
        rng.randint(4, 12),
        rng.randint(30, 90),
    )
    second = first * factor
    third = second - fewer
    pages = first + second + third + more
    times = "twice" if factor == 2 else "three times"
    return WordProblem(
        f"{name} borrows a book of {pages} pages from the {rng.choice(_PLACES)}. On the first evening "
        f"{name} reads {first} pages, on the second evening {times} as many, and on the third evening "
        f"{fewer} pages fewer than on the second. How many pages of the book are still to be read after "
        "that?",
        f"On the second evening it is {first} * {factor} = {second} pages, and on the third "
        f"{second} - {fewer} = {third} pages. Together that is {first} + {second} + {third} = "
        f"{first + second + third} pages. So {pages} - {first + second + third} = {more} pages are left.",
        more,
    )


def _savings(name: str, rng: random.Random) -> WordProblem:
    weekly, weeks, gift, jars = rng.randint(6, 18), rng.randint(5, 12), rng.randint(10, 40), rng.randint(2, 5)
    total = weekly * weeks + gift
    spent = total % jars + jars * rng.randint(2, 6)
    return WordProblem(
        f"{name} saves {weekly} dollars every week for {weeks} weeks and is then given another {gift} "
        f"dollars by an aunt. Then {name} pays {spent} dollars for a coat and puts the rest in {jars} jars, "
        "the same amount in each. How many dollars are there in one jar?",
        f"Saving brings {weekly} * {weeks} = {weekly * weeks} dollars, and with the gift it is "
        f"{weekly * weeks} + {gift} = {total} dollars. After the coat {total} - {spent} = {total - spent} "
        f"dollars remain. Each jar holds {total - spent} / {jars} = {(total - spent) // jars} dollars.",
        (total - spent) // jars,
    )


def _train(name: str, rng: random.Random) -> WordProblem:
    start, off, on, cars = rng.randint(60, 120), rng.randint(10, 40), rng.randint(12, 45), rng.randint(3, 6)
    middle = start - off + on
    last = middle % cars + cars * rng.randint(1, 3)
    return WordProblem(
        f"{name} drives a train that leaves the {rng.choice(_PLACES)} with {start} passengers. At the first "
        f"stop {off} passengers get off and {on} new ones get on. At the second stop {last} passengers "
        f"leave and nobody gets on. The rest sit evenly in {cars} cars. How many passengers are in each car?",
        f"After the first stop there are {start} - {off} + {on} = {middle} passengers. After the second "
        f"stop {middle} - {last} = {middle - last} passengers stay. In each car there are {middle - last} / "
        f"{cars} = {(middle - last) // cars} passengers.",
        (middle - last) // cars,
    )


def _bakery(name: str, rng: random.Random) -> WordProblem:
    trays, rolls, box, price = rng.randint(5, 12), rng.randint(14, 26), rng.randint(6, 9), rng.randint(4, 8)
    kept = trays * rolls % box
    boxes = trays * rolls // box
    return WordProblem(
        f"{name} bakes {trays} trays of rolls before sunrise, and every tray holds {rolls} rolls. They are "
        f"packed in boxes of {box}, and only full boxes are sold, for {price} dollars a box. Rolls that do "
        f"not fill a box are eaten at home. How many dollars does {name} earn when every full box is sold?",
        f"There are {trays} * {rolls} = {trays * rolls} rolls. They fill {boxes} boxes, since {boxes} * "
        f"{box} = {boxes * box}, and {kept} rolls are eaten at home. The boxes bring in {boxes} * {price} = "
        f"{boxes * price} dollars.",
        boxes * price,
    )


def _garden(name: str, rng: random.Random) -> WordProblem:
    rate, minutes, used, more = (
        rng.randint(8, 25),
        rng.randint(6, 15),
        rng.randint(20, 45),
        rng.randint(40, 160),
    )
    water = rate * minutes - used
    return WordProblem(
        f"{name} fills an empty tank behind the {rng.choice(_PLACES)} with a pump that gives {rate} litres "
        f"of water in a minute, and lets it run for {minutes} minutes. Later {used} litres are used for the "
        f"flower beds. The tank can hold {water + more} litres. How many more litres would make it full?",
        f"The pump gives {rate} * {minutes} = {rate * minutes} litres. After watering there are "
        f"{rate * minutes} - {used} = {water} litres in the tank. To fill it, {water + more} - {water} = "
        f"{more} litres more are needed.",
        more,
    )


def _printing(name: str, rng: random.Random) -> WordProblem:
    rate, first, second, schools = (
        rng.randint(20, 45),
        rng.randint(3, 7),
        rng.randint(2, 6),
        rng.randint(3, 8),
    )
    total = rate * (first + second)
    spoiled = total % schools + schools * rng.randint(0, 2)
    return WordProblem(
        f"{name} runs a printer that makes {rate} posters in an hour. It works for {first} hours on "
        f"Saturday and {second} hours on Sunday. Then {spoiled} posters turn out to be spoiled, and the "
        f"good ones are shared equally by {schools} schools. How many posters does each school receive?",
        f"The printer works for {first} + {second} = {first + second} hours and makes {rate} * "
        f"{first + second} = {total} posters. Without the spoiled ones there are {total} - {spoiled} = "
        f"{total - spoiled} posters. Each school receives {total - spoiled} / {schools} = "
        f"{(total - spoiled) // schools} posters.",
        (total - spoiled) // schools,
    )


_Story: TypeAlias = Callable[[str, random.Random], WordProblem]
_STORIES: tuple[_Story, ...] = (
    _orchard, _stall, _reading, _savings, _train, _bakery, _garden, _printing,
)  # fmt: skip
