"""How library code tells what it is doing without printing: the caller passes a Reporter, the default one is silent."""


class Reporter:
    """Receives notes and progress. Subclass it to show them; every method may be called from the calling thread only."""

    def note(self, text: str) -> None:
        """One line worth telling once, such as "converting to q4, once: 0.9 GB in …"."""

    def detail(self, text: str) -> None:
        """One line for -v only."""

    def progress(self, stage: str, done: float, total: float, unit: str = "") -> None:
        """`stage` ("download", "convert", "compile", "prefill") has done `done` of `total` units. done == total ends it."""


SILENT = Reporter()
