"""A feature never vanishes in silence."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streaming.capability import Capability, MissingCapabilityError, negotiate

SETS = st.frozensets(st.sampled_from(Capability))


@given(SETS, SETS, SETS)
def test_every_demand_is_granted_declined_or_an_error(
    offered: frozenset[Capability], require: frozenset[Capability], prefer: frozenset[Capability]
) -> None:
    try:
        outcome = negotiate(offered, require, prefer)
    except MissingCapabilityError as error:
        assert error.missing == require - offered != frozenset()
        return
    assert outcome.granted | outcome.declined == require | prefer
    assert outcome.granted <= offered and not outcome.declined & offered


def test_the_error_names_what_is_missing() -> None:
    with pytest.raises(MissingCapabilityError, match="translation, vocabulary"):
        negotiate(frozenset(), {Capability.VOCABULARY, Capability.TRANSLATION}, frozenset())
