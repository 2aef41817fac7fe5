"""Random attentions against the oracle: each is exact, or every rank refuses it.

    python tests/fuzz.py --cases 10000             seeds 0 to 9999; in every second case one rank differs in one thing
    python tests/fuzz.py --cases 10000 --no-odd    of these, those in which no rank differs
    python tests/fuzz.py --seconds 30              as many as fit
    python tests/fuzz.py --case "Case(seed=7)"     one, as a failure prints it
    python tests/fuzz.py --record runs/fuzz.jsonl  a line a case; seeds that stand there are not run again

See tests/cases.py. A failure is reduced to a case with as many defaults as it still fails with.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.cases import Case, draw, judge, sensible
from tests.seeds import Seeds, simpler

if __name__ == "__main__":
    Seeds(Case, __file__, draw, judge, partial(simpler, sensible)).main(__doc__)
