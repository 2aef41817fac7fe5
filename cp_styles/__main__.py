"""``python -m cp_styles explain ...``: see :mod:`cp_styles.explain.command`."""

from cp_styles.explain.command import main

main()
