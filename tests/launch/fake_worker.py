"""A worker that keeps the contract of a run but trains nothing. FAKE holds its JSON settings:

steps, step_s, crash_rank, crash ("error", "refusal", "memory", "exit" or a signal's number),
crash_step, crash_once (a file: no crash where it exists), silent (no result.json), save_s,
import_s.
"""

import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from training.events import EventLog
from training.orphans import die_with_parent


def sleep_long() -> None:
    time.sleep(600)


def crash(how: str | int, rank: int, logs: Path) -> None:
    if isinstance(how, int):
        os.kill(os.getpid(), how)
    if how == "exit":
        print("the last words", flush=True)
        sys.exit(7)
    error = {"rank": rank, "type": "RuntimeError", "message": "out of luck", "time": time.time()}
    if how == "refusal":
        error |= {"type": "MachineError", "message": "precision: no card here", "exit_status": 3}
    if how == "memory":
        error |= {"type": "OutOfMemoryError", "message": "CUDA out of memory"}
    (logs / f"error-rank-{rank}.json").write_text(json.dumps(error))
    sys.exit(1)


def crashes(fake: dict[str, Any]) -> bool:
    once = fake.get("crash_once")
    if once is None:
        return True
    try:
        Path(once).touch(exist_ok=False)
        return True
    except FileExistsError:
        return False


def main() -> None:
    die_with_parent()
    run_dir, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    fake = {"steps": 20, "step_s": 0.02, "crash_step": 3, **json.loads(os.environ["FAKE"])}
    log = os.open(run_dir / "logs" / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    multiprocessing.Process(target=sleep_long, daemon=True).start()  # as a data loader
    events = EventLog(run_dir / "logs" / "events.jsonl")
    if rank == 0:
        events.write("phase", text="importing Megatron")
    time.sleep(fake.get("import_s", 0))
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
    if rank == 0:
        events.write("ready")
    for step in range(1, fake["steps"] + 1):
        time.sleep(fake["step_s"])
        if rank == fake.get("crash_rank") and step == fake["crash_step"] and crashes(fake):
            crash(fake["crash"], rank, run_dir / "logs")
        if rank == 0:
            events.write(
                "step",
                step=step,
                train_steps=fake["steps"],
                loss=5 / step,
                step_s=fake["step_s"],
                tokens_per_s_per_gpu=12345.0,
                device="cpu",
            )
            if step == 10:
                events.write("validation", step=step, validation_loss=1.25)
        if stop:
            break
    time.sleep(fake.get("save_s", 0))
    if rank == 0 and not fake.get("silent"):
        result = {"status": "stopped" if stop else "done", "steps": step, "final_loss": 5 / step}
        (run_dir / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
