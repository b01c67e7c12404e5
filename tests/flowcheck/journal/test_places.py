"""Which place is written next."""

from __future__ import annotations

import pytest

from flowcheck.journal.places import Places


def filled(*numbers: int) -> Places:
    """A ring of so many places, which were written one after the other."""
    places = Places(len(numbers))
    for ticket, number in enumerate(numbers, 1):
        places.holds(ticket - 1, number, ticket)
    return places


def taken(places: Places, number: int, oldest: int = 0) -> int:
    place = places.take(number, oldest)
    assert place is not None
    return place


def test_empty_ones_go_first() -> None:
    places = Places(3)
    places.holds(0, 5, 1)
    assert {taken(places, 6), taken(places, 7)} == {1, 2}
    assert places.entries == [5] and places.last == 1


@pytest.mark.parametrize(
    ("numbers", "number", "oldest", "place"),
    [
        ((7, 5, 6), 8, 0, 0),  # the one that was written first, whatever its number
        ((7, 5, 6), 8, 6, 1),  # before the oldest that is kept
        ((7, 5, 6), 8, 7, 1),  # of two such the one that was written first
        ((7, 5, 6), 6, 6, 2),  # the same iteration
        ((7, 5, 0), 8, 0, 0),  # nothing is before 0
    ],
)
def test_what_is_of_least_use_goes_first(numbers: tuple[int, ...], number: int, oldest: int, place: int) -> None:
    places = filled(*numbers)
    assert taken(places, number, oldest) == place
    assert places.entries == sorted({*numbers} - {numbers[place]}), "it is gone from now on"


def test_what_is_being_written_is_not_taken_again() -> None:
    places = filled(1, 2)
    assert [places.take(number, 0) for number in (3, 4, 5)] == [0, 1, None]
    places.holds(1, 4, 4)
    assert places.take(5, 0) == 1


def test_of_two_with_one_number_the_later_one_counts() -> None:
    places = Places(3)
    first, second = taken(places, 1), taken(places, 1)
    places.holds(first, 1, 1)
    places.holds(second, 1, 2)
    assert places.entries == [1]
    third = taken(places, 1)
    assert third == second, "what is newest in the table is the one that is replaced"


def test_a_place_that_fails_is_tried_twice_more_and_then_in_its_turn() -> None:
    places = filled(1, 2, 3)
    for ticket in (4, 5, 6):
        assert taken(places, 4) == 0
        places.failed(0, ticket)
    for ticket, place in ((7, 1), (8, 2), (9, 0)):
        assert taken(places, ticket) == place
        places.holds(place, ticket, ticket)
    assert places.entries == [7, 8, 9] and places.last == 9


def test_one_that_worked_again_has_its_tries_back() -> None:
    places = filled(1, 2)
    for ticket in (3, 4):
        assert taken(places, 3) == 0
        places.failed(0, ticket)
    places.holds(taken(places, 5), 5, 5)
    assert places.entries == [2, 5]
    places.holds(taken(places, 6), 6, 6)
    for ticket in (7, 8, 9):
        assert taken(places, 7) == 0
        places.failed(0, ticket)
    assert taken(places, 10) == 1
