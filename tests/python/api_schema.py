"""Schemathesis over a running server's OpenAPI document: whatever is sent, no answer is a 5xx.

    python api_schema.py http://127.0.0.1:8000
"""

import subprocess
import sys
from pathlib import Path


def main(base_url: str) -> None:
    program = Path(sys.executable).with_name("schemathesis")
    run = subprocess.run(
        [
            program,
            "run",
            f"{base_url}/openapi.json",
            "--checks=not_a_server_error",
            "--phases=examples,coverage,fuzzing",
            "--mode=all",
            "--max-examples=30",
            "--generation-deterministic",
            "--suppress-health-check=all",
            "--request-timeout=30",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    print(run.stdout[-4000:], run.stderr[-2000:])
    sys.exit(run.returncode)


if __name__ == "__main__":
    main(sys.argv[1])
