"""Programs in processes that have imported torch already: one interpreter does, and forks for each program.

For what a process reads when it imports cute_lce; importing torch takes a new interpreter seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

FORKS = """
import json, os, sys, traceback
import torch
statuses = []
for environment, code, files in json.load(sys.stdin):
    child = os.fork()
    if not child:
        os.environ.update(environment)
        for number, file in enumerate(files, 1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
        status = 0
        try:
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        except SystemExit as end:
            status = end.code or 0
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(statuses))
"""


def run(programs: Sequence[tuple[dict[str, str], str]]) -> list[subprocess.CompletedProcess[str]]:
    """What became of each (what is added to the environment, code)."""
    with tempfile.TemporaryDirectory() as folder:
        files = [[f"{folder}/{i}.{name}" for name in ("out", "err")] for i in range(len(programs))]
        given = json.dumps([(*program, file) for program, file in zip(programs, files, strict=True)])
        done = subprocess.run(
            [sys.executable, "-c", FORKS], input=given, stdout=subprocess.PIPE, text=True, check=True
        )
        return [
            subprocess.CompletedProcess(code, status, *(Path(file).read_text() for file in out_and_err))
            for (_, code), status, out_and_err in zip(programs, json.loads(done.stdout), files, strict=True)
        ]
