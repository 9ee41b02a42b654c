"""Prints the key for PDSERVE_WORKER_PROOF_KEY, out of PDSERVE_CONTROL_TOKEN: `python -m pdserve.router.worker_proof`.

The proofs are made in `http/worker_proof`.
"""

from __future__ import annotations

import sys

from pdserve.base.env import control_token
from pdserve.http.session_proof import worker_secret


def main() -> int:
    """Print the key for a router that does not get the token itself. Exit status: 2 without a token."""
    token = control_token()
    if not token:
        print("PDSERVE_CONTROL_TOKEN is not set", file=sys.stderr)
        return 2
    print(worker_secret(token).hex())
    return 0


if __name__ == "__main__":
    sys.exit(main())
