"""Entry point of `mstarctl`: a lazy table of commands, global flags, errors and exit codes. It imports no command."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup, TyperOption

from mstar_core.errors import ConfigError, ExitCode, MstarError, UsageError, did_you_mean, nearest
from mstar_core.targets import load_target
from mstarctl.output.errors import render_error, save_traceback
from mstarctl.output.options import FORMATS, GlobalOptions

PROGRAM = "mstarctl"
FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class Verb:
    """One row of the command table. target: "module:function" or "module:typer_app", imported when it is used."""

    name: str
    target: str
    help: str
    group: str


# help repeats the first line of the target's docstring, which is not imported for it.
DEPLOYMENTS, MODELS, TOOLS = "Deployments", "Models and configuration", "Tools"
VERBS: tuple[Verb, ...] = (
    Verb("up", "mstarctl.commands.up:up", "Start a deployment.", DEPLOYMENTS),
    Verb(
        "plan",
        "mstarctl.commands.plan:plan",
        "Show the memory that a deployment would take of each device, its holders and the rest.",
        DEPLOYMENTS,
    ),
    Verb("down", "mstarctl.commands.down:down", "Drain deployments, then stop them.", DEPLOYMENTS),
    Verb(
        "reload",
        "mstarctl.commands.reload:reload",
        "Read the files of API keys and the certificate again, without a restart.",
        DEPLOYMENTS,
    ),
    Verb("restart", "mstarctl.commands.restart:restart", "Restart a deployment's processes.", DEPLOYMENTS),
    Verb(
        "cordon",
        "mstarctl.commands.cordon:cordon",
        "Send a rank no new requests; those that it has finish.",
        DEPLOYMENTS,
    ),
    Verb("uncordon", "mstarctl.commands.cordon:uncordon", "Send a rank new requests again.", DEPLOYMENTS),
    Verb("set", "mstarctl.commands.set:set_values", "Change limits while a deployment runs.", DEPLOYMENTS),
    Verb("scale", "mstarctl.commands.scale:scale", "Add or remove replicas of a running deployment.", DEPLOYMENTS),
    Verb("drain", "mstarctl.commands.drain:drain", "Refuse new requests; those in flight finish.", DEPLOYMENTS),
    Verb("resume", "mstarctl.commands.resume:resume", "Accept new requests again after a drain.", DEPLOYMENTS),
    Verb(
        "serve",
        "mstarctl.commands.serve:app",
        "Serve many models at one address. Without a subcommand: start a gateway (`serve up`).",
        DEPLOYMENTS,
    ),
    Verb(
        "sleep",
        "mstarctl.commands.sleep:sleep",
        "Give the device memory of a deployment back; a request or `wake` takes it again.",
        DEPLOYMENTS,
    ),
    Verb(
        "wake",
        "mstarctl.commands.sleep:wake",
        "Take the device memory of a sleeping deployment, or of some nodes, again.",
        DEPLOYMENTS,
    ),
    Verb("ps", "mstarctl.commands.ps:ps", "List the deployments of this host.", DEPLOYMENTS),
    Verb("hosts", "mstarctl.commands.hosts:hosts", "List the hosts of a deployment, or of a Ray cluster.", DEPLOYMENTS),
    Verb("top", "mstarctl.commands.top:top", "Watch a deployment live in the terminal.", DEPLOYMENTS),
    Verb("describe", "mstarctl.commands.describe:describe", "Show everything known about one object.", DEPLOYMENTS),
    Verb(
        "requests",
        "mstarctl.commands.requests:requests",
        "List requests in flight and recently ended ones.",
        DEPLOYMENTS,
    ),
    Verb(
        "trace", "mstarctl.commands.trace:trace", "Show one request as a waterfall: where its time went.", DEPLOYMENTS
    ),
    Verb("cancel", "mstarctl.commands.cancel:cancel", "Cancel requests and free their resources.", DEPLOYMENTS),
    Verb("logs", "mstarctl.commands.logs:logs", "Show the logs of a deployment or a gateway.", DEPLOYMENTS),
    Verb("events", "mstarctl.commands.events:events", "Show the events of a deployment.", DEPLOYMENTS),
    Verb("metrics", "mstarctl.commands.metrics:metrics", "Print every metric in Prometheus text format.", DEPLOYMENTS),
    Verb("call", "mstarctl.commands.call:call", "Send one request and write the answer to a file.", DEPLOYMENTS),
    Verb(
        "sample",
        "mstarctl.commands.sample:sample",
        "Write inputs that fit a model, and print the calls that send them.",
        DEPLOYMENTS,
    ),
    Verb("chat", "mstarctl.commands.chat:chat", "Talk with a model in the terminal.", DEPLOYMENTS),
    Verb("talk", "mstarctl.commands.talk:talk", "Speak with a model: microphone or files in, speech out.", DEPLOYMENTS),
    Verb("bench", "mstarctl.commands.bench:app", "Measure a server under load, and compare runs.", DEPLOYMENTS),
    Verb(
        "usage",
        "mstarctl.commands.usage:show_usage",
        "Show what tenants have used, by day, model and key.",
        DEPLOYMENTS,
    ),
    Verb(
        "tenants",
        "mstarctl.commands.tenants:app",
        "Create tenants of gateways, their limits and their keys.",
        DEPLOYMENTS,
    ),
    Verb("lora", "mstarctl.commands.lora:app", "Load, unload and list LoRA adapters.", DEPLOYMENTS),
    Verb("models", "mstarctl.commands.models:app", "List, show and draw the models of the installed plugins.", MODELS),
    Verb("config", "mstarctl.commands.config:app", "Check, show and explain deployment files.", MODELS),
    Verb("plugins", "mstarctl.commands.plugins:app", "List, check and create plugins.", MODELS),
    Verb(
        "doctor",
        "mstarctl.commands.doctor:doctor",
        "Check this host, or those of a Ray cluster: versions, devices, memory, folders, ports, plugins.",
        TOOLS,
    ),
    Verb("unit", "mstarctl.commands.unit:unit", "Print a systemd unit that runs a deployment.", TOOLS),
    Verb("context", "mstarctl.commands.context:app", "Name other hosts and choose one.", TOOLS),
    Verb(
        "api",
        "mstarctl.commands.api:api",
        "Send one request to the admin socket and print the response as it arrives.",
        TOOLS,
    ),
    Verb("completion", "mstarctl.commands.completion:completion", "Print the completion script of a shell.", TOOLS),
    Verb(
        "version",
        "mstarctl.commands.version:version",
        "Show the versions of the tool, the plugin API and the plugins.",
        TOOLS,
    ),
    Verb("help", "mstarctl.commands.help:show_help", "Explain a command, or the exit codes.", TOOLS),
)


SYNONYMS: Mapping[str, str] = {
    "status": "ps",
    "list": "ps",
    "ls": "ps",
    "start": "up",
    "run": "up",
    "stop": "down",
    "kill": "down",
    "stats": "top",
    "monitor": "top",
    "watch": "top",
    "check": "doctor",
    "log": "logs",
    "ask": "call",
    "show": "describe",
}
"""Words of other tools, for suggestions after an unknown command."""


def suggestion(word: str) -> str:
    """Return the hint for an unknown command."""
    name = nearest(word, [*(verb.name for verb in VERBS), *SYNONYMS])
    if name is None:
        return "mstarctl help lists the commands"
    return f"did you mean {SYNONYMS.get(name, name)!r}?"


class LazyGroup(TyperGroup):
    """The root group. It resolves a command when it is called; help and completion read only the table."""

    def __init__(self, verbs: Sequence[Verb], **attrs: Any) -> None:
        super().__init__(rich_markup_mode=None, invoke_without_command=False, **attrs)
        self.verbs = {verb.name: verb for verb in verbs}

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.verbs)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        verb = self.verbs.get(cmd_name)
        return None if verb is None else resolve(verb)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name = args[0]
        if name not in self.verbs and not ctx.resilient_parsing:
            raise UsageError(f"unknown command {name!r}", hint=suggestion(name))
        return name, self.get_command(ctx, name), args[1:]

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        from typer.core import CompletionItem  # type: ignore[attr-defined]  # re-exported silently

        return [CompletionItem(v.name, help=v.help) for v in self.verbs.values() if v.name.startswith(incomplete)]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for group in dict.fromkeys(verb.group for verb in self.verbs.values()):
            with formatter.section(group):
                formatter.write_dl([(verb.name, verb.help) for verb in self.verbs.values() if verb.group == group])


def resolve(verb: Verb) -> Any:
    """Import the target of a verb and build its command, with global flags."""
    target = load_target(verb.target)
    if isinstance(target, typer.Typer):
        app = target
    else:
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(name=verb.name)(target)
    command = typer.main.get_command(app)
    command.name = verb.name
    for part in _with_parts(command):
        part.rich_markup_mode = None
        taken = {word for option in part.params for word in option.opts}
        part.params = [*part.params, *(o for o in global_options() if not taken.intersection(o.opts))]
    return command


def _with_parts(command: Any) -> Iterator[Any]:
    yield command
    for part in getattr(command, "commands", {}).values():
        yield from _with_parts(part)


def global_options() -> list[TyperOption]:
    """Return the flags of every command. Each writes into the command line's GlobalOptions."""
    return [
        _flag(
            ["-o", "--output"], _set_output, f"format of the data: {'|'.join(FORMATS)}", metavar="FORMAT", is_flag=False
        ),
        _flag(
            ["-c", "--context"],
            _set_context,
            "the host to connect to; local is this one",
            metavar="NAME",
            is_flag=False,
        ),
        _flag(["--socket"], _set_socket, "the admin socket to connect to", metavar="PATH", is_flag=False),
        _flag(["--no-color"], _setter("color", False), "no colour, as with NO_COLOR"),
        _flag(["-q", "--quiet"], _setter("quiet", True), "no narration on stderr"),
        _flag(["-v", "--verbose"], _setter("verbose", True), "more narration on stderr"),
        _flag(["--debug"], _setter("debug", True), "show tracebacks"),
        _flag(["--yes"], _setter("assume_yes", True), "confirm every question"),
    ]


def _flag(
    words: list[str], callback: Any, text: str, *, metavar: str | None = None, is_flag: bool = True
) -> TyperOption:
    name = words[-1].lstrip("-").replace("-", "_") + "_"
    return TyperOption(
        param_decls=[name, *words],
        callback=callback,
        help=text,
        metavar=metavar,
        is_flag=is_flag,
        default=False if is_flag else None,
        expose_value=False,
        is_eager=True,
        rich_help_panel="Global options",
    )


def _setter(field: str, value: bool) -> Any:
    def set_field(ctx: Any, param: Any, typed: Any) -> None:
        if typed and isinstance(ctx.obj, GlobalOptions):
            setattr(ctx.obj, field, value)

    return set_field


def _set_output(ctx: Any, param: Any, name: str | None) -> None:
    if name is None or ctx.resilient_parsing:
        return
    if name not in FORMATS:
        raise UsageError(f"unknown output format {name!r}", hint=did_you_mean(name, FORMATS))
    ctx.obj.output = name


def _set_context(ctx: Any, param: Any, name: str | None) -> None:
    if name is not None and isinstance(ctx.obj, GlobalOptions):
        ctx.obj.context = name


def _set_socket(ctx: Any, param: Any, path: str | None) -> None:
    if path is not None and isinstance(ctx.obj, GlobalOptions):
        ctx.obj.socket = Path(path)


def _show_version(ctx: Any, param: Any, is_set: Any) -> None:
    if is_set and not ctx.resilient_parsing:
        from mstarctl.version import client_version

        print(f"{PROGRAM} {client_version()}")
        raise typer.Exit


def root() -> LazyGroup:
    """Return the whole command line."""
    return LazyGroup(
        VERBS,
        name=PROGRAM,
        params=[*global_options(), _flag(["--version"], _show_version, "show the version")],
        help="Serve and observe multimodal models.",
        epilog="mstarctl COMMAND --help explains one command; mstarctl help exit-codes lists the exit codes.",
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code. Prints every error; raises only SystemExit."""
    try:
        code = _run(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, closed the pipe. Nothing may be flushed into it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.DONE
    except OSError as error:
        if error.errno not in FULL:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _fail(_full(error), GlobalOptions())
    return code


def _run(argv: Sequence[str] | None) -> int:
    options = GlobalOptions()
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    is_completing = "_MSTARCTL_COMPLETE" in os.environ
    try:
        if is_completing:
            from typer.completion import completion_init  # type: ignore[attr-defined]  # re-exported silently

            completion_init()
        code = root().main(arguments, prog_name=PROGRAM, standalone_mode=False, obj=options)
        return code if isinstance(code, int) else ExitCode.DONE
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except typer.Abort:
        print("nothing was changed", file=sys.stderr)
        return ExitCode.USAGE
    except typer.TyperException as error:
        usage = UsageError(error.format_message().rstrip("."), hint=_help_hint(error))
        return _fail(usage, options)
    except MstarError as error:
        return _fail(error, options)
    except Exception as error:  # noqa: BLE001  isolation boundary of one command line
        if is_completing:
            return ExitCode.DONE
        if isinstance(error, OSError) and error.errno in FULL:
            return _fail(_full(error), options)
        return _crash(error, options)


def _full(error: OSError) -> MstarError:
    """Return the error of a full disk, whichever file a command wrote."""
    place = f" for {error.filename}" if error.filename else ""
    reason = "no space is left" if error.errno == errno.ENOSPC else "the disk quota is used up"
    return ConfigError(
        f"{reason}{place}", "the output is incomplete", "free some space, then run it again", code="disk_full"
    )


def _help_hint(error: typer.TyperException) -> str:
    context, param = getattr(error, "ctx", None), getattr(error, "param", None)
    if context is not None and getattr(getattr(param, "type", None), "name", "").startswith("int"):
        return f"give a whole number; {context.command_path} --help"
    return "" if context is None or "Did you mean" in error.message else f"{context.command_path} --help"


def _fail(error: MstarError, options: GlobalOptions) -> int:
    if options.debug:
        _print_traceback(error)
    width = min(shutil.get_terminal_size().columns, 104) if sys.stderr.isatty() else 0
    text = render_error(error, width=width)
    if options.is_coloured(sys.stderr):
        from mstarctl.output.paint import Paint

        text = text.replace("error:", Paint.of(options, sys.stderr).text("error:", "bad"), 1)
    print(text, file=sys.stderr, flush=True)
    return error.exit_code


def _crash(error: Exception, options: GlobalOptions) -> int:
    path = save_traceback(error)
    if options.debug:
        _print_traceback(error)
    detail = f"{type(error).__name__}: {error}"
    log = {} if path is None else {"log": str(path)}
    return _fail(
        MstarError(
            "internal error in mstarctl", detail, "run it again with --debug and report the saved traceback", **log
        ),
        GlobalOptions(color=options.color),
    )


def _print_traceback(error: BaseException) -> None:
    import traceback

    traceback.print_exception(error)
