"""Prompts for `bench_speculation`: tasks whose answers repeat the prompt, and ordinary chat. No two prompts are equal.

The drafter may find past outputs of a server, so a prompt that came twice would be answered from memory.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

NAMES = ("Ada", "Boris", "Clara", "Dmitri", "Elif", "Farah", "Goran", "Hana", "Ivan", "Jun", "Kofi", "Lena", "Mateo")
SURNAMES = ("Abbott", "Berger", "Castro", "Dietz", "Eriksen", "Fontaine", "Grant", "Huang", "Ito", "Jansen", "Kovacs")
CITIES = ("Lyon", "Porto", "Graz", "Turku", "Leeds", "Bergen", "Split", "Ghent", "Cork", "Basel", "Brno", "Malaga")
ITEMS = ("lamp", "kettle", "bicycle", "notebook", "camera", "violin", "teapot", "jacket", "compass", "printer")
SENTENCES = (
    "{name} {surname} bought a {item} in {city} for {n} euros and carried it home through the rain.",
    "The {item} that arrived on day {n} was returned to {city} because its box had been opened.",
    "In {city} the price of a {item} has risen from {n} to {m} euros since {name} opened the shop.",
    "{name} wrote {n} letters about the missing {item}, and {surname} answered only one of them.",
    "After {n} minutes the train to {city} stopped, and {name} found the {item} under a seat.",
    "The museum of {city} shows a {item} from 18{n}, which {surname} gave to the town.",
    "Every {item} in the store room has a label with the name {surname} and the number {m}.",
)
TOPICS = (
    "how bread rises", "why the sky is blue", "how a bicycle stays upright", "what causes tides", "how vaccines work",
    "why leaves change their colour", "how a refrigerator cools", "what inflation means", "how bees make honey",
    "why we dream", "how glass is made", "what a black hole is", "how sailing against the wind works",
    "why languages change", "how a lock and a key work", "what makes music sad", "how maps are drawn",
    "why cats purr", "how a bridge carries weight", "what a good night of sleep does",
)  # fmt: skip
READERS = ("a child of ten", "a new colleague", "my grandmother", "a student of law", "a visitor from another country")
FORMS = ("Explain {topic} to {reader}.", "Write a short letter to {reader} about {topic}.", "{reader} asks me about "
         "{topic}. What should I say?", "Tell a short story in which {reader} learns {topic}.")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Task:
    """One request: the user's message, how the answer begins, and the temperature."""

    message: str
    begun: str = ""
    temperature: float = 0.0

    @property
    def prompt(self) -> str:
        """The text in the chat format of SmolLM2, which is ChatML."""
        system = "You are a helpful assistant."
        return (
            f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{self.message}<|im_end|>\n"
            f"<|im_start|>assistant\n{self.begun}"
        )


def editing(rng: random.Random) -> Task:
    """A text that shall be repeated with another name."""
    text = " ".join(_sentence(rng) for _ in range(7))
    first = " ".join(text.split()[:4])
    message = f"Repeat this text word by word, but write Olga instead of {rng.choice(NAMES)}.\n\n{text}"
    return Task(message, f"Here is the text:\n\n{first}")


def extraction(rng: random.Random) -> Task:
    """Records that shall be listed as JSON."""
    records = []
    for number in range(8):
        name, surname, city = rng.choice(NAMES), rng.choice(SURNAMES), rng.choice(CITIES)
        mail = f"{name.lower()}.{surname.lower()}{rng.randrange(10, 99)}@mail.example"
        records.append(f"{number + 1}. {name} {surname}, {city}, {mail}")
    message = "List the people below as JSON with name, city and email.\n\n" + "\n".join(records)
    return Task(message, '```json\n[\n  {"name": "')


def code(rng: random.Random) -> Task:
    """A class that shall be repeated with type hints."""
    item, number = rng.choice(ITEMS), rng.randrange(10, 99)
    fields = rng.sample(("price", "weight", "height", "colour", "owner", "city", "year", "label"), 4)
    lines = [f"class {item.capitalize()}{number}:", f"    def __init__(self, {', '.join(fields)}):"]
    lines += [f"        self.{field} = {field}" for field in fields]
    for field in fields:
        lines += ["", f"    def with_{field}(self, {field}):"]
        lines.append(f"        return {item.capitalize()}{number}({', '.join(f'self.{one}' for one in fields)})")
    message = "Add a docstring to each method of this class and repeat all of it.\n\n```python\n{}\n```"
    return Task(message.format("\n".join(lines)), f"```python\n{lines[0]}\n")


def chat(rng: random.Random) -> Task:
    """An ordinary question, answered greedily."""
    form, topic, reader = rng.choice(FORMS), rng.choice(TOPICS), rng.choice(READERS)
    message = form.format(topic=topic, reader=reader)
    return Task(f"{message[0].upper()}{message[1:]} Mention {rng.choice(NAMES)} and {rng.choice(CITIES)}.")


def drawn_chat(rng: random.Random) -> Task:
    """An ordinary question at temperature 1."""
    return dataclasses.replace(chat(rng), temperature=1.0)


KINDS: dict[str, Callable[[random.Random], Task]] = {
    "editing": editing,
    "extraction": extraction,
    "code": code,
    "chat": chat,
    "chat, drawn": drawn_chat,
}
REPEATING = ("editing", "extraction", "code")


def tasks(kind: str, count: int, seed: str) -> list[Task]:
    """Return `count` different tasks. Equal seeds give equal tasks."""
    rng = random.Random(f"{kind} {seed}")
    made: dict[str, Task] = {}
    while len(made) < count:
        task = KINDS[kind](rng)
        made.setdefault(task.message, task)
    return list(made.values())


def _sentence(rng: random.Random) -> str:
    return rng.choice(SENTENCES).format(
        name=rng.choice(NAMES), surname=rng.choice(SURNAMES), city=rng.choice(CITIES), item=rng.choice(ITEMS),
        n=rng.randrange(20, 99), m=rng.randrange(100, 999),
    )  # fmt: skip
