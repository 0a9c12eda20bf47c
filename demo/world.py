"""The small world that the demo model knows: facts, prompts and their plain answers.

Every prompt has exactly one right answer, so a person and a test can judge an output at a glance.
Knows nothing of tokens or models: chat.py turns questions into tokens, styles.py rewrites the answers.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple


class Animal(NamedTuple):
    """What the world knows of an animal; home includes its preposition."""

    name: str
    colour: str
    home: str
    food: str
    sound: str


ANIMALS = tuple(
    Animal(*line.split(", "))
    for line in """\
fox, red, in the forest, mice, yap
cat, black, in the house, fish, meow
dog, brown, in the house, bones, woof
cow, white, on the farm, grass, moo
duck, yellow, on the pond, seeds, quack
frog, green, on the pond, flies, croak
owl, grey, in the forest, mice, hoot
lion, yellow, in the desert, meat, roar
pig, pink, on the farm, corn, oink
sheep, white, on the farm, grass, baa
crow, black, in the field, seeds, caw
bee, yellow, in the garden, honey, buzz
horse, brown, on the farm, hay, neigh
wolf, grey, in the mountains, meat, howl
bear, brown, in the cave, honey, growl
mouse, grey, in the house, cheese, squeak
snake, green, in the desert, eggs, hiss
goat, white, in the mountains, leaves, bleat
parrot, blue, in the jungle, nuts, squawk
monkey, brown, in the jungle, bananas, chatter
hen, red, on the farm, corn, cluck
seal, grey, in the sea, fish, bark
elephant, grey, in the jungle, leaves, trumpet
penguin, black, in the sea, fish, honk""".splitlines()
)

COLOURS_OF_THINGS = dict(
    line.split(" ")
    for line in """\
lemon yellow
banana yellow
tomato red
cherry red
apple red
brick red
rose red
strawberry red
cucumber green
pea green
lime green
leaf green
carrot orange
pumpkin orange
plum purple
grape purple
cloud white
snowflake white
potato brown
coconut brown
mushroom brown
blueberry blue
sapphire blue
sunflower yellow""".splitlines()
)

CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Germany": "Berlin",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
    "Norway": "Oslo",
    "Poland": "Warsaw",
    "Greece": "Athens",
    "Portugal": "Lisbon",
    "Austria": "Vienna",
    "Ireland": "Dublin",
    "Cuba": "Havana",
    "Peru": "Lima",
    "Kenya": "Nairobi",
    "China": "Beijing",
}

OPPOSITES = (
    *(("hot", "cold"), ("big", "small"), ("fast", "slow"), ("up", "down"), ("day", "night"), ("old", "young")),
    *(("wet", "dry"), ("full", "empty"), ("loud", "quiet"), ("soft", "hard"), ("light", "dark"), ("happy", "sad")),
)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


PEOPLE = _words(
    "Maria Anna Tom Lena Omar Yuki Paul Nina Igor Sofia Ben Clara Hugo Mei Raj Eva Sam Zoe Leo Ines Kofi Lucy Max "
    "Rosa Ivan Amira John Emma Noah Olga Peter Alice"
)

GREETINGS = {
    "hello": "Hello, {}! It is nice to meet you.",
    "goodbye": "Goodbye, {}! See you soon.",
    "good morning": "Good morning, {}! I hope you slept well.",
    "good night": "Good night, {}! Sleep well.",
    "thank you": "Thank you, {}! You are very kind.",
    "happy birthday": "Happy birthday, {}! I hope you have a great day.",
}

NUMBERS = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)


@dataclass(frozen=True, slots=True)
class Fact:
    """One right answer and the prompts that ask for it."""

    kind: str
    answer: str
    prompts: tuple[str, ...]
    # True if the answer combines parts that other facts share: then all its prompts can be held out together.
    composed: bool = False


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt and its plain answer."""

    kind: str
    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Split:
    """The questions to train on, and those that no training ever sees."""

    train: tuple[Question, ...]
    held_out: tuple[Question, ...]


def split_world(seed: int = 0) -> Split:
    """Hold out new combinations: of parts where answers are composed, else of a known fact and a known wording."""
    rng = random.Random(seed)
    train: list[Question] = []
    held_out: list[Question] = []
    for fact in all_facts():
        hidden = _held_out_prompts(fact, rng)
        for prompt in fact.prompts:
            (held_out if prompt in hidden else train).append(Question(fact.kind, prompt, fact.answer))
    return Split(tuple(train), tuple(held_out))


def all_facts() -> Iterator[Fact]:
    """Everything that the world knows."""
    yield from _identity()
    yield from _colours()
    yield from _animals()
    yield from _capitals()
    yield from _opposites()
    yield from _greetings()
    yield from _counting()
    yield from _sums()
    yield from _stories()


def _held_out_prompts(fact: Fact, rng: random.Random) -> tuple[str, ...]:
    if fact.composed:
        return fact.prompts if rng.random() < 0.1 else ()
    # Three wordings must stay, or the fact itself would hardly be known.
    if len(fact.prompts) > 3 and rng.random() < 0.4:
        return (rng.choice(fact.prompts),)
    return ()


def _identity() -> Iterator[Fact]:
    yield Fact(
        "identity",
        "I am the small demo model of lorafleet.",
        ("Who are you?", "What are you?", "What is your name?"),
    )
    yield Fact(
        "identity",
        "I can count, add small numbers, name colours and capitals, greet people and tell stories about animals.",
        ("What can you do?", "What do you know?", "Help!"),
    )
    yield Fact("identity", "Hello! How can I help you?", ("Hello!", "Hi!", "Good day!"))


def _colours() -> Iterator[Fact]:
    animals = {animal.name: animal.colour for animal in ANIMALS}
    for name, colour in (COLOURS_OF_THINGS | animals).items():
        one = _with_article(name)
        yield Fact(
            "colour",
            f"{_capitalised(one)} is {colour}.",
            (
                f"What colour is {one}?",
                f"What color is {one}?",
                f"Tell me the colour of {one}.",
                f"Which colour does {one} have?",
                f"What is the colour of {one}?",
            ),
        )


def _animals() -> Iterator[Fact]:
    for name, colour, home, food, sound in ANIMALS:
        one = _with_article(name)
        yield Fact(
            "home",
            f"{_capitalised(one)} lives {home}.",
            (f"Where does {one} live?", f"Where can I find {one}?", f"Where is the home of {one}?", f"Find me {one}."),
        )
        yield Fact(
            "food",
            f"{_capitalised(one)} eats {food}.",
            (f"What does {one} eat?", f"What do I feed {one}?", f"Which food does {one} like?", f"Feed {one}."),
        )
        yield Fact(
            "sound",
            f"{_capitalised(one)} says {sound}.",
            (f"What does {one} say?", f"Which sound does {one} make?", f"How does {one} sound?", f"Talk like {one}."),
        )
        yield Fact(
            "describe",
            f"The {name} is {colour}. It lives {home}, it eats {food} and it says {sound}.",
            (f"Describe the {name}.", f"Describe {one}.", f"Tell me about the {name}.", f"What is {one}?"),
        )


def _capitals() -> Iterator[Fact]:
    for country, city in CAPITALS.items():
        yield Fact(
            "capital",
            f"The capital of {country} is {city}.",
            (
                f"What is the capital of {country}?",
                f"Name the capital of {country}.",
                f"Which city is the capital of {country}?",
                f"Tell me the capital of {country}.",
            ),
        )


def _opposites() -> Iterator[Fact]:
    for pair in OPPOSITES:
        for word, opposite in (pair, pair[::-1]):
            yield Fact(
                "opposite",
                f"The opposite of {word} is {opposite}.",
                (
                    f"What is the opposite of {word}?",
                    f"Name the opposite of {word}.",
                    f"Which word is the opposite of {word}?",
                    f"Tell me the opposite of {word}.",
                ),
            )


def _greetings() -> Iterator[Fact]:
    for name, (words, answer) in product(PEOPLE, GREETINGS.items()):
        prompts = (f"Say {words} to {name}.", f"Please say {words} to {name}.", f"Can you say {words} to {name}?")
        yield Fact("greeting", answer.format(name), prompts, composed=True)


def _counting() -> Iterator[Fact]:
    for first, last in product(range(1, 13), repeat=2):
        if abs(first - last) < 2:
            continue
        step = 1 if last > first else -1
        count = "count" if step == 1 else "count down"
        words = ", ".join(NUMBERS[n] for n in range(first, last + step, step))
        request = f"{count} from {NUMBERS[first]} to {NUMBERS[last]}"
        yield Fact(
            "count",
            f"{_capitalised(words)}.",
            (f"{_capitalised(request)}.", f"Please {request}.", f"Can you {request}?", f"I want you to {request}."),
        )


def _sums() -> Iterator[Fact]:
    for a, b in product(range(1, 11), repeat=2):
        sum_words = f"{NUMBERS[a]} plus {NUMBERS[b]}"
        yield Fact(
            "sum",
            f"{_capitalised(sum_words)} is {NUMBERS[a + b]}.",
            (
                f"What is {sum_words}?",
                f"How much is {sum_words}?",
                f"Tell me {sum_words}.",
                f"Add {NUMBERS[a]} and {NUMBERS[b]}.",
            ),
        )


def _stories() -> Iterator[Fact]:
    for animal, (thing, thing_colour) in product(ANIMALS, COLOURS_OF_THINGS.items()):
        both = f"{_with_article(animal.name)} and {_with_article(thing)}"
        yield Fact(
            "story",
            f"Once upon a time there was {_with_article(animal.colour)} {animal.name} that lived {animal.home}. "
            f"One day it was tired of {animal.food} and went out to look for something new. "
            f"Soon the {animal.name} found {_with_article(thing_colour)} {thing}. "
            f"It took the {thing} home, said {animal.sound} and was happy.",
            (f"Tell me a story about {both}.", f"Write a story about {both}.", f"Tell a tale of {both}."),
            composed=True,
        )


def _with_article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _capitalised(text: str) -> str:
    return text[0].upper() + text[1:]
