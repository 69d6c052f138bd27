"""Values on the way between two processes: descriptions of objects that cannot travel."""

import copy
import datetime

import pytest

from gvpo_trl.environments.appworld.wire import values


class Price(int):
    def __str__(self):
        return "three"


class Thing:
    def __init__(self, name):
        self.name = name

    def __repr__(self):
        return f"<{self.name}>"


def test_described_values_keep_their_text_their_content_and_the_name_of_their_type():
    moment = datetime.datetime(2023, 5, 18, 12)
    sent = [Price(3), moment, Thing("a"), Thing("b")]
    price, received, *things = values.decode(values.encode(sent))
    assert (price, str(price), type(price).__name__) == (3, "three", "Price")
    assert isinstance(received, datetime.datetime) and received == moment and str(received) == str(moment)
    assert str(copy.deepcopy(received)) == str(moment) and repr(copy.copy(received)) == repr(moment)
    assert [repr(thing) for thing in things] == ["<a>", "<b>"]
    assert [thing.logged for thing in things] == [{"name": "a"}, {"name": "b"}]


def test_described_values_of_one_type_share_it_because_a_type_takes_a_kilobyte():
    first, second = values.decode(values.encode([Thing("a"), Thing("b")]))
    assert type(first) is type(second)


def test_a_process_makes_a_bounded_number_of_types(monkeypatch):
    monkeypatch.setattr(values, "MAX_TYPES", 10)
    monkeypatch.setattr(values, "_types", {})
    sent = [values.encode(type(f"Thing{number}", (Thing,), {})("a")) for number in range(11)]
    assert len(values.decode(sent[:10])) == 10
    assert len(values.decode(sent[:10])) == 10
    with pytest.raises(ValueError, match="more than 10 types"):
        values.decode(sent)
