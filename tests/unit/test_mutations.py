from pathlib import Path

from tests import mutations

ROOT = Path(__file__).parents[2]


def test_each_mistake_has_one_place_and_tests():
    lost = [
        mistake.name
        for mistake in mutations.FUZZED + mutations.OTHERS
        if len(mutations.places(mistake, ROOT / "cp_styles")) != 1
        or any(".py" in word and not (ROOT / word).exists() for word in mutations.tests_of(mistake.tests))
    ]
    assert lost == []
