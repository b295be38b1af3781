"""Building blocks of the commands: options that also read QWENC_<OPTION>, help on -h, a group with a default command."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import click

from qwenc.commands.screen import write_out

HELP_NAMES = ["-h", "--help"]


class FileName(click.ParamType):
    """A name that the shell completes as a file; whoever opens it judges it."""

    name = "path"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list:
        from click.shell_completion import CompletionItem

        return [CompletionItem(incomplete, type="file")]


class WholeNumber(click.ParamType):
    """A whole number from `least` to 2^`bits` - 1."""

    name = "whole number"

    def __init__(self, least: int, bits: int = 31) -> None:
        self.least, self.bits = least, bits

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            number = int(value)
        except ValueError:  # also for more digits than Python reads
            self.fail(f"{shorten(value)} is not a whole number of at most 2^{self.bits}-1", param, ctx)
        if number < self.least:
            self.fail(f"must be at least {self.least}, not {shorten(value)}", param, ctx)
        if number >= 1 << self.bits:
            self.fail(f"must be at most 2^{self.bits}-1, not {shorten(value)}", param, ctx)
        return number


class YesNo(click.types.BoolParamType):
    """click's boolean, in plain words."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bool:
        found = self.bool_states.get(value.strip().lower()) if isinstance(value, str) else bool(value)
        if found is None:
            self.fail(f"must be 1 or 0 (also true or false, yes or no, on or off), not {shorten(value)}", param, ctx)
        return found


def shorten(value: object) -> str:
    """`value` as Python spells it, for an error message."""
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}…"


def option_name(name: str) -> str:
    """--top-p of top_p."""
    return f"--{name.replace('_', '-')}"


class Option(click.Option):
    """An option that the environment can set too: --max-tokens is QWENC_MAX_TOKENS. A repeatable one takes the variable as one value."""

    def __init__(self, declarations: list[str] | None = None, **attributes: Any) -> None:
        super().__init__(declarations, **attributes)
        if isinstance(self.type, click.types.BoolParamType):
            self.type = YesNo()
        longest = max((name for name in self.opts if name.startswith("--")), key=len, default="")
        if longest and self.envvar is None:
            self.envvar = "QWENC_" + longest.lstrip("-").replace("-", "_").upper()

    def value_from_envvar(self, ctx: click.Context) -> Any:
        value = self.resolve_envvar_value(ctx)
        return (value,) if self.multiple and value is not None else super().value_from_envvar(ctx)

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """Names the variable when the wrong value comes from there."""
        if ctx is not None and self.name and ctx.get_parameter_source(self.name) is click.core.ParameterSource.ENVIRONMENT:
            return f"{self.envvar}"
        return super().get_error_hint(ctx)


def option(*declarations: str, **attributes: Any) -> Callable:
    return click.option(*declarations, cls=Option, **attributes)


def _show_help(ctx: click.Context, _param: click.Parameter, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        write_out(ctx.get_help() + "\n")
        ctx.exit()


def _show_version(ctx: click.Context, _param: click.Parameter, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        from qwenc.version import __version__

        write_out(f"qwenc {__version__}\n")
        ctx.exit()


def _eager_flag(*names: str, callback: Callable, text: str) -> click.Option:
    return click.Option(list(names), is_flag=True, is_eager=True, expose_value=False, callback=callback, help=text)


class Command(click.Command):
    """A command whose help goes through write_out, so that a closed pipe or a full disk ends it as it ends everything else."""

    def __init__(self, *args: Any, **attributes: Any) -> None:
        super().__init__(*args, **attributes | {"add_help_option": False})
        self.params.append(_eager_flag("--version", callback=_show_version, text="Show the version and exit."))
        self.params.append(_eager_flag(*HELP_NAMES, callback=_show_help, text="Show this message and exit."))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The epilog as it is written: it holds examples."""
        if self.epilog:
            formatter.write("\n" + self.epilog.strip("\n") + "\n")


class DefaultGroup(click.Group):
    """A group that hands whatever does not start with a command's name to the command `default`."""

    def __init__(self, *args: Any, default: str, **attributes: Any) -> None:
        super().__init__(*args, **attributes | {"add_help_option": False})
        self.default = default
        self.params.append(_eager_flag("--version", callback=_show_version, text="Show the version and exit."))
        self.params.append(_eager_flag(*HELP_NAMES, callback=_show_help, text="Show this message and exit."))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {*self.commands, *HELP_NAMES, "--version"}
        completing_first_word = ctx.resilient_parsing and not args
        if not completing_first_word and (not args or args[0] not in own):
            args = [self.default, *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list:
        """Commands, and the options of the default command."""
        default = self.commands[self.default]
        default_ctx = click.Context(default, parent=ctx, info_name=self.default, resilient_parsing=True)
        own = super().shell_complete(ctx, incomplete)
        known = {item.value for item in own}
        return own + [item for item in default.shell_complete(default_ctx, incomplete) if item.value not in known]

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage("qwenc", "[run] [OPTIONS] [PROMPT]")
        formatter.write_usage("qwenc", "COMMAND [OPTIONS] …", prefix="       ")

    format_epilog = Command.format_epilog  # type: ignore[assignment]


def json_option(text: str) -> Callable:
    return option("--json", "as_json", is_flag=True, help=text)


def quiet_option() -> Callable:
    return option("-q", "--quiet", is_flag=True, help="Nothing on stderr but errors.")


def verbose_option() -> Callable:
    return option("-v", "--verbose", is_flag=True, help="Say more on stderr.")


def color_option() -> Callable:
    choice = click.Choice(["auto", "always", "never"])
    text = "Colour notes and bars on stderr (stdout never holds escapes). auto heeds NO_COLOR, FORCE_COLOR and TERM=dumb."
    return option("--color", type=choice, default="auto", show_default=True, help=text)


def debugging() -> bool:
    """QWENC_DEBUG set: failures come with their traceback."""
    return bool(os.environ.get("QWENC_DEBUG"))
