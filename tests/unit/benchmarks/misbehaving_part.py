"""A part of the GPU check that ends as its name says."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

name, gpu, _, folder, findings = sys.argv[1:]
with open(findings, "a", encoding="utf-8") as file:
    file.write(f'{{"what": "GPU {gpu}"}}\n')
    if name == "half":
        file.write('{"wha')
if name == "dead":
    os.kill(os.getpid(), signal.SIGKILL)
if name == "slow":
    sleeper = subprocess.Popen(["sleep", "600"], start_new_session=True)
    Path(folder, "pid").write_text(str(sleeper.pid))
    time.sleep(600)
