"""What a process of a cluster is, from its command line: `Prefill`, `raylet`, `ServeController`, `baton serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_REPLICA: Final = "ServeReplica:"
_SCRIPTS: Final = {"monitor.py": "autoscaler monitor", "dashboard.py": "dashboard", "log_monitor.py": "log monitor"}
_MODULES: Final = {"deploy.cli": "baton serve"}


def role_of(pid: int) -> str:
    """The role of a live process; its kernel name where the command line says nothing.

    Raises:
        OSError: it has ended.
    """
    command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    return role_of_command(command.split("\0")) or Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()


def role_of_command(arguments: list[str]) -> str:
    """The role that a command line names, or an empty string.

    Ray writes a title over the arguments of its Python processes, `ray::ServeReplica:baton:Prefill`, pads it with blanks, and puts the
    method behind it while one runs.
    """
    program = arguments[0].strip()
    if program.startswith("ray::"):
        title = program.removeprefix("ray::").partition(".")[0]
        return title.rpartition(":")[2] if title.startswith(_REPLICA) else title
    name = Path(program).name
    if not name.startswith("python"):
        return name
    if "-m" in arguments[:-1]:
        module = arguments[arguments.index("-m") + 1]
        return _MODULES.get(module, module)
    script = next((Path(argument).name for argument in arguments[1:] if argument.endswith(".py")), name)
    return _SCRIPTS.get(script, script)


def is_replica(pid: int) -> bool:
    """Whether it is a replica of a Serve deployment: Baton's own code.

    Raises:
        OSError: it has ended.
    """
    return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::" + _REPLICA.encode())
