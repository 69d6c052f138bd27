"""Defines what a scenario family is, and the pieces of code that all families share."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from .vocabulary import Draw, Person, person

Values = dict[str, Any]
NORMAL_SPLITS = ("train", "dev", "test_normal")
CHALLENGE_SPLITS = ("test_challenge",)


class Row(NamedTuple):
    """One record to create. A field given as `"@label"` takes the id of the earlier row with that label."""

    app: str
    model: str
    fields: dict[str, Any]
    label: str | None = None


class Slip(NamedTuple):
    """A turn that goes wrong; `label` says in a few words how."""

    code: str
    label: str


class Check(NamedTuple):
    """One unit test of a task: the requirement in words, the body of its `with test(...)` block, and AppWorld's label.

    The label `no_op_fail` says that the test fails on an untouched world, `no_op_pass` that it passes there.
    """

    requirement: str
    code: str
    label: str = "no_op_fail"


class Effect(NamedTuple):
    """One change of a database record that an honest solution makes."""

    kind: str
    """`added` or `updated`; no task asks to remove a record."""
    model: str
    """The record's table, `app.Model`."""
    fields: dict[str, Any]
    """For an added record, the fields that say whose it is, and those that an agent can set and was not asked to set.
    For an updated one, its `id` and its changed `fields`.
    """


def added(model: str, **fields: Any) -> Effect:
    """Expect a new record. `fields` say whose it is and which settings it has; an empty value counts as `None`."""
    return Effect("added", model, {name: value or None for name, value in fields.items()})


def updated(model: str, record_id: int, *fields: str) -> Effect:
    """Expect a record of which these fields changed, and no others."""
    return Effect("updated", model, {"id": record_id, "fields": sorted(fields)})


def equal(requirement: str, left: str, right: str) -> Check:
    """Make a test that two expressions of the evaluation are equal."""
    return Check(requirement, f'test.case({left}, "==", {right})')


def among(requirement: str, member: str, group: str) -> Check:
    """Make a test that one expression of the evaluation is in another."""
    return Check(requirement, f'test.case({member}, "in", {group})')


@dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of task. Everything about a task that depends on its drawn values is a function of them.

    `turns(values)` is the reference solution for a fresh world, with one string of Python for each turn.

    `slips(values)` has one list for each turn. Its code runs in place of that turn and ends in an error. It does no
    harm, so the turn itself can follow.

    `wrong_ends(values)` run in place of the last turn, complete the task, and leave at least one test failing.
    AppWorld ignores an argument that an API does not have, so a wrong name for an optional argument raises no error
    and makes a wrong end.
    """

    name: str
    apps: tuple[str, ...]
    difficulty: int
    """From 1 to 3."""
    phrases: tuple[str, ...]
    """Templates of the instruction, to be filled with the values."""
    draw: Callable[[Draw], Values]
    rows: Callable[[Values], list[Row]]
    turns: Callable[[Values], list[str]]
    slips: Callable[[Values], list[list[Slip]]]
    wrong_ends: Callable[[Values], list[Slip]]
    effects: Callable[[Values], list[Effect]]
    """Every change of the world that an honest solution makes. A task fails when anything else has changed."""
    changes: str
    """Source of the evaluation before its tests, which names what changed in the world."""
    checks: tuple[Check, ...]
    """The unit tests of what is asked for, without the one on `effects` that every family has."""
    facts: Callable[[Values], dict[str, Any]] = lambda values: {}
    """What the tests need besides the values."""
    answer: Callable[[Values], str | None] = lambda values: None
    """The answer that the task asks for, or None where it asks for none."""
    documented: tuple[str, str] | None = None
    """App and API whose arguments the solution looks up first."""
    splits: tuple[str, ...] = NORMAL_SPLITS

    def sample(self, draw: Draw) -> Values:
        """Draw the values of one task. `supervisor` is a first name, `phrase` the index of a template."""
        supervisor = draw.name()
        return {"supervisor": supervisor, "phrase": draw.choice(range(len(self.phrases))), **self.draw(draw)}

    def instruction(self, values: Values) -> str:
        """Write the task's text."""
        return self.phrases[values["phrase"]].format(**values)

    def supervisor(self, values: Values) -> Person:
        """Return the person who gives the task."""
        return person(values["supervisor"])

    @property
    def tests(self) -> tuple[Check, ...]:
        """All unit tests of a task. The last one requires what the others require, and no other change of the world.

        An untouched world therefore fails it, even where the task changes nothing because it asks for an answer.
        """
        code = "\n".join(check.code for check in self.checks)
        return (*self.checks, Check(EXACTLY, f"{code}\n{NOTHING_ELSE}"))

    def private_data(self, values: Values) -> dict[str, Any]:
        """Collect what the tests compare the world with, besides the values."""
        effects = sorted(
            ([*effect] for effect in self.effects(values)), key=lambda effect: json.dumps(effect, sort_keys=True)
        )
        return {**self.facts(values), "effects": effects}

    def evaluation(self) -> str:
        """Write the source of the task's `evaluation.py`."""
        lines = [EVALUATION_HEAD, *(f"    {line}" for line in self.changes.strip().splitlines())]
        for check in self.tests:
            lines.append(f"    with test({check.requirement!r}):")
            lines.extend(f"        {line}" for line in check.code.strip().splitlines())
        return "\n".join(lines) + "\n"

    def solution(self, values: Values) -> str:
        """Write the reference solution as one function, the form in which AppWorld keeps it."""
        body = "\n".join(self.turns(values)).splitlines()
        return "\n".join(["def solution(apis, requester):", *(f"    {line}" for line in body)]) + "\n"


EXACTLY = "All of that holds, and nothing else in the world changed."
NOTHING_ELSE = 'test.case(effects(models, private_data["effects"]), "==", private_data["effects"])'

EVALUATION_HEAD = '''"""Unit tests of a pocket task."""

import json
import re


def only(records, **fields):
    """Return the one record with these values, and None when there are none or several."""
    found = [record for record in records if all(getattr(record, name) == fields[name] for name in fields)]
    return found[0] if len(found) == 1 else None


def answer_words(models):
    """Return the agent's answer as lower-case words and numbers."""
    given = json.loads(models.end.supervisor.Task.all()[0].answer)
    return re.findall(r"[a-z0-9:]+", str(given).lower())


def effects(models, wanted):
    """List all changes of the world as [kind, model, fields], in the form and the order of `wanted`.

    The fields of an added or removed record are those that `wanted` gives for its kind and model. An empty value is
    shown as None, because apps store some settings that were left out as None and others as an empty list.
    """
    names = {(kind, model): fields for kind, model, fields in wanted}
    found = []
    for model in models.changed_model_names():
        added, _, removed = models.changed_records(model)
        for kind, records in (("added", added), ("removed", removed)):
            fields = names.get((kind, model), ["id"])
            found += [[kind, model, {name: getattr(record, name) or None for name in fields}] for record in records]
        # Records are compared by id, because changed_records() misses one that was made equal to another record.
        before = dict(models.start.ids_record_hashes(*model.split(".")))
        after = dict(models.end.ids_record_hashes(*model.split(".")))
        for record_id in before.keys() & after.keys():
            if before[record_id] != after[record_id]:
                changed = sorted(models.changed_field_names(model, record_id))
                found.append(["updated", model, {"id": record_id, "fields": changed}])
    return sorted(found, key=lambda effect: json.dumps(effect, sort_keys=True))


def evaluate(test, public_data, private_data, main_user, models, ground_truth_answer):
    """Test the world as the agent left it."""'''


def docs(app: str, api: str) -> str:
    """Write a turn that prints the names of an API's arguments."""
    return (
        f'for p in apis.api_docs.show_api_doc(app_name="{app}", api_name="{api}")["parameters"]:\n    print(p["name"])'
    )


def docs_slips(app: str, api: str) -> list[Slip]:
    """Write turns that fail to look up an API."""
    code = docs(app, api)
    return [
        swap(code, "app_name=", "app=", "wrong argument name"),
        swap(code, f'api_name="{api}"', f'api_name="{app}"', "an API that is not there"),
        swap(code, 'p["name"]', 'p["argument"]', "wrong key"),
    ]


def login(app: str, username: str = "email") -> str:
    """Write a turn that logs the supervisor in. `username` is the field of the profile that the app asks for."""
    return (
        'pw = {a["account_name"]: a["password"] for a in apis.supervisor.show_account_passwords()}\n'
        f'token = apis.{app}.login(username=apis.supervisor.show_profile()["{username}"], password=pw["{app}"])'
        '["access_token"]'
    )


def login_slips(app: str, username: str = "email") -> list[Slip]:
    """Write turns that fail to log in."""
    code = login(app, username)
    other = "email" if username == "phone_number" else "first_name"
    return [
        swap(code, "login(username=", f"login({username}=", "wrong argument name"),
        swap(code, f'show_profile()["{username}"]', f'show_profile()["{other}"]', "wrong user name"),
        swap(code, f'pw["{app}"]', 'pw["password"]', "wrong key"),
        swap(code, "login(", "log_in(", "an API that is not there"),
    ]


def swap(code: str, old: str, new: str, label: str) -> Slip:
    """Replace every `old` in the code by `new`.

    Raises:
        ValueError: `old` is not in the code, so nothing would change.
    """
    if old not in code:
        raise ValueError(f"{old!r} is not in the code:\n{code}")
    return Slip(code.replace(old, new), label)


def no_token(code: str) -> Slip:
    """Leave the access tokens out of the code."""
    return Slip(code.replace(", access_token=token", "").replace("access_token=token", ""), "no access token")


def misspelt_token(code: str) -> Slip:
    """Use an access token variable that does not exist."""
    return swap(code, "access_token=token", "access_token=access_token", "undefined name")


DONE = "apis.supervisor.complete_task()"
