"""The closed sets from which pocket tasks draw their values.

Every entry is one plain word or number, so a tokenizer that keeps the entries of `closed_sets()` whole can copy any
value with one token. Each set is cut into three fixed pools, whatever the seed: `train` has half of it, `dev` and
`test` a quarter each. The values of `dev` and `test` are held out: the `train` split of a root never shows them,
unless that root was asked for other pools.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass

POOLS = ("train", "dev", "test")

_WORDS = (
    "Harbor Lantern Garden Copper Velvet Maple Ember Pepper Saddle Meadow Marble Anchor Basket Canyon Dragon Falcon "
    "Ginger Hammer Island Jacket Kettle Lemon Magnet Needle Orchid Pillow Quartz Ribbon Salmon Tunnel Violin Walnut "
    "Yogurt Zephyr Acorn Bridge Candle Desert Engine Feather Glacier Hazel Igloo Jasmine Koala Ladder Mirror Nutmeg "
    "Oyster Parrot Rabbit Silver Thistle Umbrella Valley Willow Cactus Beacon Cobalt Tulip Panda Rocket Summit Temple"
)
_FIRST_NAMES = (
    "Ana Ben Cleo Dan Eva Finn Gus Hana Ivan Jane Kurt Lena Milo Nora Omar Pia "
    "Rosa Sven Tara Ugo Vera Wade Yara Zeno Alma Boris Cora Dora Emil Faye Gwen Hugo"
)
WORDS = tuple(_WORDS.split())
FIRST_NAMES = tuple(_FIRST_NAMES.split())
LAST_NAMES = ("Stone", "Reed", "Hill", "Brook", "Wood", "Lake", "Field", "Moss")
ARTISTS = (
    "Nova",
    "Orbit",
    "Pulse",
    "Echo",
    "Prism",
    "Vortex",
    "Comet",
    "Drift",
    "Fable",
    "Mosaic",
    "Riddle",
    "Saga",
    "Tempo",
    "Verse",
    "Whisper",
    "Zenith",
)
GENRES = ("pop", "rock", "jazz", "folk", "blues", "metal")
PRIORITIES = ("high", "low")
NUMBERS = tuple(range(13, 77, 2))
QUANTITIES = tuple(range(2, 10))
TIMES = tuple(f"{6 + half_hour // 2:02d}:{half_hour % 2 * 30:02d}" for half_hour in range(16))

LOGIN_APPS = ("amazon", "phone", "file_system", "spotify", "venmo", "gmail", "splitwise", "simple_note", "todoist")


def closed_sets() -> dict[str, tuple[str, ...]]:
    """Return every value that an instruction, a solution or an observation may hold, as text, by kind."""
    sets = {
        "words": WORDS,
        "first_names": FIRST_NAMES,
        "last_names": LAST_NAMES,
        "artists": ARTISTS,
        "genres": GENRES,
        "priorities": PRIORITIES,
        "numbers": NUMBERS,
        "quantities": QUANTITIES,
        "times": TIMES,
        "emails": [person.email for person in PEOPLE],
        "phone_numbers": [person.phone_number for person in PEOPLE],
    }
    return {kind: tuple(str(value) for value in values) for kind, values in sets.items()}


def pool(values: Iterable, *names: str) -> list:
    """Select the entries of a closed set that belong to the named pools, in their order.

    Raises:
        ValueError: a name is not one of `POOLS`.
    """
    unknown = [name for name in names if name not in POOLS]
    if unknown:
        raise ValueError(f"value pool {unknown[0]!r} is unknown; use {', '.join(POOLS)}")
    owner = ("train", "train", "dev", "test")
    return [value for position, value in enumerate(values) if owner[position % 4] in names]


@dataclass(frozen=True, kw_only=True)
class Person:
    """Somebody with an account in every app."""

    id: int
    """The same number in the user table of each app."""
    first_name: str
    last_name: str
    email: str
    phone_number: str
    """Ten digits."""
    birthday: str
    """YYYY-MM-DD."""

    @property
    def name(self) -> str:
        """First and last name, as the apps show them."""
        return f"{self.first_name} {self.last_name}"


def _person(position: int) -> Person:
    first, last = FIRST_NAMES[position], LAST_NAMES[(position + position // 8) % len(LAST_NAMES)]
    return Person(
        id=position + 1,
        first_name=first,
        last_name=last,
        email=f"{first}.{last}@mail.com".lower(),
        phone_number=f"5550{100 + position:03d}{(position * 37) % 1000:03d}",
        birthday=f"{1970 + position}-0{1 + position % 9}-15",
    )


PEOPLE = tuple(_person(position) for position in range(len(FIRST_NAMES)))
_BY_NAME = {person.first_name: person for person in PEOPLE}


def person(first_name: str) -> Person:
    """Return the one person with this first name.

    Raises:
        ValueError: nobody has this name.
    """
    if first_name not in _BY_NAME:
        raise ValueError(f"nobody is called {first_name!r}; see families.vocabulary.FIRST_NAMES")
    return _BY_NAME[first_name]


def artist_of(title: str) -> str:
    """Return the artist of the song with this title. The artist is of the same pool as the title."""
    position = WORDS.index(title)
    return ARTISTS[position % 4 + 4 * (position // 4 % (len(ARTISTS) // 4))]


def genre_of(title: str) -> str:
    """Return the genre of the song with this title."""
    return GENRES[(WORDS.index(title) * 5 + WORDS.index(title) // 6) % len(GENRES)]


class Draw:
    """Draws the values of one task from the given pools. The same state of `rng` gives the same values."""

    def __init__(self, rng: random.Random, pools: tuple[str, ...]):
        self._rng = rng
        self._words = rng.sample(pool(WORDS, *pools), len(pool(WORDS, *pools)))
        self._names = rng.sample(pool(FIRST_NAMES, *pools), len(pool(FIRST_NAMES, *pools)))
        self._numbers = rng.sample(pool(NUMBERS, *pools), len(pool(NUMBERS, *pools)))
        self._times = pool(TIMES, *pools)

    def word(self) -> str:
        """Draw a word that this task does not hold yet."""
        return self._words.pop()

    def name(self) -> str:
        """Draw the first name of a person whom this task does not hold yet."""
        return self._names.pop()

    def number(self) -> int:
        """Draw a number that this task does not hold yet."""
        return self._numbers.pop()

    def time(self) -> str:
        """Draw a time of day, HH:MM."""
        return self._rng.choice(self._times)

    def choice(self, values: Iterable):
        """Draw one of the given values, for sets that all splits share."""
        return self._rng.choice(list(values))

    def shuffled(self, values: Iterable) -> list:
        """Return the given values in a drawn order."""
        values = list(values)
        return self._rng.sample(values, len(values))
