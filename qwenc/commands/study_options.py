"""Options that sweep, bench and quality share: the settings of `qwenc run`, but as lists of values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import click

from qwenc.commands.engine_options import engine_options
from qwenc.commands.params import FileName, Option, WholeNumber, YesNo, color_option, option, option_name, quiet_option, verbose_option
from qwenc.commands.tables import FORMATS
from qwenc.errors import UsageError
from qwenc.report import Reporter
from qwenc.settings import Settings

if TYPE_CHECKING:
    from qwenc.study.arms import Arm

SCALAR = ("pin", "mmap", "ctx_size", "offline")  # settings that are one value for a whole study
RUN = {
    param.name: param
    for param in click.command()(
        engine_options(option("-c", "--ctx-size", type=WholeNumber(1), metavar="N")(lambda **_values: None))
    ).params
}
LISTED = tuple(field.name for field in fields(Settings) if field.name in RUN and field.name not in SCALAR)


class ListOf(click.ParamType):
    """Values of another type with commas between; of whole numbers also ranges."""

    def __init__(self, one: click.ParamType) -> None:
        self.one = one
        self.name = f"list of {one.name}"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list:
        if isinstance(value, list):
            return value
        if isinstance(self.one, WholeNumber):
            from qwenc.study.values import whole_numbers

            try:
                return whole_numbers(value, self.one.least)
            except UsageError as error:
                self.fail(str(error), param, ctx)
        found = [self.one.convert(part.strip(), param, ctx) for part in value.split(",")]
        return list(dict.fromkeys(found))

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list:
        return [] if "," in incomplete else self.one.shell_complete(ctx, param, incomplete)


def numbers_option(*declarations: str, least: int = 0, **attributes: Any) -> Callable:
    return option(*declarations, type=ListOf(WholeNumber(least)), metavar="LIST", **attributes)


def setting_options(**defaults: list) -> Callable:
    """Every setting of `qwenc run` as a list. `defaults`: other lists than the one value that run has."""

    def add(function: Callable) -> Callable:
        for name in ("offline", "pin", "mmap", *LISTED[::-1], "ctx_size"):
            if name in RUN:
                function = _add(function, _scalar(RUN[name]) if name in SCALAR else _listed(RUN[name], defaults.get(name)))
        return function

    return add


def _add(function: Any, param: click.Parameter) -> Any:
    """As click's decorators do it."""
    function.__click_params__ = [*getattr(function, "__click_params__", []), param]
    return function


def _scalar(param: Any) -> Any:
    """As it is, but for a short name that means contexts here."""
    if param.name != "ctx_size":
        return param
    return Option(["--ctx-size"], type=param.type, metavar=param.metavar, help="Longest context. Default: what the model was made for.")


def _listed(param: Any, default: list | None) -> Option:
    one = YesNo() if param.is_flag else param.type
    start = [getattr(Settings(), param.name)] if default is None else default
    told = start == [None] or "[default" in param.help
    text = param.help if told else f"{param.help}  [default: {','.join(_spell(value) for value in start)}]"
    more: dict[str, Any] = {"is_flag": False, "flag_value": "on"} if param.is_flag else {}
    names = [name for name in param.opts if name.startswith("--") or name == "-t"]
    return Option([*names, param.name], type=ListOf(one), default=start, help=text, metavar="LIST", **more)


def _spell(value: Any) -> str:
    return {True: "on", False: "off"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def model_option() -> Callable:
    return option("-m", "--model", type=FileName(), metavar="MODEL", help="Checkpoint folder, packed file or Hub id (or QWENC_MODEL).")


def text_option(text: str) -> Callable:
    return option("-f", "--file", type=FileName(), metavar="PATH", help=text)


def output_options(function: Callable) -> Callable:
    """-o, -q, -v, --color."""
    form = option(
        *("-o", "--output"),
        type=click.Choice(FORMATS),
        help="Form of stdout. Default: a table on a terminal, md elsewhere. csv, json and jsonl hold more fields.",
    )
    for add in (color_option(), quiet_option(), verbose_option(), form):
        function = add(function)
    return function


@dataclass(frozen=True, slots=True)
class Chosen:
    """model; base: settings of one value; lists: the others, by name."""

    model: str
    base: dict[str, Any]
    lists: dict[str, Sequence[Any]]

    def arms(self) -> list[Arm]:
        """Every combination. Raises UsageError in the words of the command line."""
        from qwenc.study.arms import cross

        try:
            return cross(self.base, self.lists)
        except UsageError as error:
            named, _, rest = str(error).partition(" ")
            raise UsageError(f"{option_name(named) if named in self.lists else named} {rest}") from None

    def open_engine(self, settings: Settings, reporter: Reporter) -> Any:
        """The model with `settings`."""
        import qwenc.engine

        return qwenc.engine.load(self.model, reporter=reporter, **asdict(settings))


def read_settings(values: dict[str, Any]) -> Chosen:
    """What a study was asked for. Raises UsageError."""
    if not values["model"]:
        raise UsageError("no model: give -m a checkpoint folder, a packed file or a Hub id, or set QWENC_MODEL")
    if values["verbose"] and values["quiet"]:
        raise UsageError("-v and -q exclude each other")
    base = {name: values[name] for name in SCALAR}
    lists = {name: values[name] for name in LISTED}
    return Chosen(values["model"], base, lists)
