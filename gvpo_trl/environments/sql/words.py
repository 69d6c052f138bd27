"""The words of the databases, in pools that the splits do not share.

A schema of `dev` or `test` therefore has names of tables and columns, and values, that no task of `train` has. The
split `warm` draws from all pools: it is for the transcripts of a warm start, whose model should know every word as a
pretrained one does.
"""

from dataclasses import dataclass, fields

NUMERIC = "INTEGER"
TEXT = "TEXT"


@dataclass(frozen=True, kw_only=True, slots=True)
class Words:
    """The words that the databases of one split are made of."""

    nouns: tuple[str, ...]
    """What the rows of a table are."""
    affixes: tuple[str, ...]
    """Forms of a table's name, in which `*` stands for the noun."""
    measures: tuple[str, ...]
    """Columns of numbers, which questions ask for."""
    names: tuple[str, ...]
    """Names of rows."""
    groups: tuple[str, ...]
    """Values of the column that sorts rows into groups."""
    id_columns: tuple[str, ...]
    name_columns: tuple[str, ...]
    group_columns: tuple[str, ...]
    next_columns: tuple[str, ...]
    """Forms of the column that refers to another row of the same table, in which `*` stands for its id column."""
    property_columns: tuple[tuple[str, str], ...]
    """Columns of property and value in a table with one row for each property of a thing."""
    parts: tuple[str, ...]
    """Suffixes of the tables into which the rows of one kind are divided."""


def _pool(**texts: str) -> Words:
    return Words(
        **{name: tuple(text.split()) for name, text in texts.items() if name != "property_columns"}
        | {"property_columns": tuple(tuple(pair.split("/")) for pair in texts["property_columns"].split())}
    )


POOLS: dict[str, Words] = {
    "train": _pool(
        nouns="ship port crew farm mill barn shop clerk bridge river tower guard engine cabin wagon field",
        affixes="* *s t_* *_list",
        measures="weight price length depth speed width score rating",
        names="Nova Orion Delta Ember Falcon Granite Harbor Indigo Juniper Kestrel Linden Maple Nimbus Onyx Pepper"
        " Quartz Raven Sable Tundra Umber Velvet Willow Xenon Yarrow Zephyr Acorn Birch Cedar Dune Elm Fjord Grove",
        groups="red blue green amber",
        id_columns="id key no",
        name_columns="name title label",
        group_columns="kind class",
        next_columns="next_*",
        property_columns="property/value",
        parts="_north _south _east",
    ),
    "dev": _pool(
        nouns="hotel guest pilot plane camera studio tunnel mine",
        affixes="all_* *_table *_log my_*",
        measures="volume height power",
        names="Basil Clover Dahlia Fennel Ginger Hazel Ivy Jasmine Lotus Mint Nettle Olive Poppy Rosemary Saffron"
        " Thyme",
        groups="teal ivory coral",
        id_columns="code serial",
        name_columns="caption heading term",
        group_columns="type sort",
        next_columns="after_*",
        property_columns="aspect/figure detail/entry trait/reading",
        parts="_old _mid _new",
    ),
    "test": _pool(
        nouns="museum statue tenant castle rocket orbit vessel garden archive editor",
        affixes="tbl_* *_data *_set x_*",
        measures="range cost area mass",
        names="Atlas Borealis Cosmo Draco Eos Fornax Gaia Hydra Io Janus Kepler Lyra Mira Norma Oberon Pallas Rhea"
        " Sirius Titan Vega",
        groups="gold silver bronze",
        id_columns="ref num",
        name_columns="tag alias mark",
        group_columns="grade family",
        next_columns="later_*",
        property_columns="item/amount facet/level feature/quantity",
        parts="_alpha _beta _gamma",
    ),
}
"""The pools of the splits that are told apart."""
POOLS["warm"] = Words(
    **{field.name: sum((getattr(pool, field.name) for pool in POOLS.values()), ()) for field in fields(Words)}
)
SPLITS = tuple(POOLS)
