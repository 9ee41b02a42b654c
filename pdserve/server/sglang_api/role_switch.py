"""`POST /pd_role_switch`: changes the prefill/decode role of a running server. Path and fields are SGLang's.

    {"new_role": "prefill" | "decode" | "null", "drain_timeout_secs": 300, "wait": true, "reload": false}
    200 {"success": true, ...}     the server serves in the new role; also when it had it before
    202 {"success": true, ...}     with `wait` false: the switch has begun
    400, 409                       the switch is impossible; the server is unchanged
    500 {"success": false, ...}    the switch has failed; with `safe_to_restore` the old role serves again

This file validates the request; `lifecycle/instance.py` performs the switch.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Protocol

from fastapi import Request
from fastapi.responses import Response

from pdserve.base.stream_state import MEMORY_RELEASED
from pdserve.config.groups import DisaggMode
from pdserve.errors import RequestError
from pdserve.http.errors import HttpRefusal
from pdserve.server.context import ServerContext
from pdserve.server.http.drain_gate import DrainGate
from pdserve.server.http.json_http import convert, json_response, read_json_object
from pdserve.server.request.schemas import RoleSwitchBody
from pdserve.server.sglang_api.health import is_released

DRAIN_S = 300.0
MAX_DRAIN_S = 86_400.0


@dataclasses.dataclass(frozen=True)
class RoleChanged:
    """Result of a role switch. `bootstrap_port`: of a new prefill server, else None.

    `safe_to_restore`: the server serves, so a router may send it requests. `in_place`: the engine was not reloaded;
    None: the role was the same.
    """

    old_role: DisaggMode
    new_role: DisaggMode
    message: str
    bootstrap_port: int | None = None
    safe_to_restore: bool = True
    in_place: bool | None = None


FAILED_CODE = "role_switch_failed"


class RoleChanger(Protocol):
    """Changes the role of the running server."""

    @property
    def is_serving(self) -> bool:
        """Whether the server takes requests now."""
        ...

    async def begin(self, role: DisaggMode, drain_s: float, *, reload: bool = False) -> asyncio.Future[RoleChanged]:
        """Begin the switch to `role`, which differs from the present role; the future resolves when it has ended.

        Running requests have `drain_s` seconds to end. The configuration is validated before the drain begins.
        `reload`: see `RoleSwitchBody`.

        Raises:
            RequestError: 400, the server cannot have this role; 409, a switch is in progress or the server shuts down.
        """
        ...


async def pd_role_switch(
    context: ServerContext, drain_gate: DrainGate, changer: RoleChanger | None, request: Request
) -> Response:
    """Change the role of this server; responds when the switch has ended, or with `wait` false when it has begun.

    A refusal or failure has SGLang's fields beside the error.
    """
    body = convert(await read_json_object(request, context.max_body_bytes), RoleSwitchBody)
    old = context.mode
    try:
        return await _switch(context, drain_gate, changer, body)
    except RequestError as error:
        refusal = HttpRefusal.of(error)
        fields = {"success": False, "message": error.message, "old_role": old, "new_role": body.new_role}
        fields["safe_to_restore"] = changer is not None and changer.is_serving
        return json_response(refusal.body | fields, status=refusal.status, headers=refusal.headers)


async def _switch(
    context: ServerContext, drain_gate: DrainGate, changer: RoleChanger | None, body: RoleSwitchBody
) -> Response:
    drain_s = DRAIN_S if body.drain_timeout_secs is None else body.drain_timeout_secs
    if not 0 <= drain_s <= MAX_DRAIN_S:
        message = f"drain_timeout_secs must be 0 to {MAX_DRAIN_S:g} seconds, got {drain_s}"
        raise RequestError(message, field="drain_timeout_secs")
    if body.new_role is None:
        raise RequestError("new_role is missing; give prefill, decode or null", field="new_role")
    old = context.mode
    if body.new_role == old:
        drain_gate.require_open()
        return _answer(RoleChanged(old, old, "already in target role"), status=200)
    if changer is None or not context.config.disagg.enable_pd_role_switch:
        message = "new_role: the role of this server cannot be changed (--no-enable-pd-role-switch)"
        raise RequestError(message, field="new_role", code="role_switch_off")
    context.client.require_ready()
    if is_released(drain_gate):
        message = "new_role: the memory of this server is released; call /resume_memory_occupation first"
        raise RequestError(message, field="new_role", status=409, code=MEMORY_RELEASED)
    if body.prepare_only:
        return _answer(RoleChanged(old, body.new_role, "nothing has to be prepared; the role is the same"), status=200)
    done = await changer.begin(body.new_role, drain_s, reload=body.reload is True)
    if body.wait is False:
        return _answer(
            RoleChanged(old, body.new_role, "accepted; /ready returns 200 when the switch is complete"), status=202
        )
    return _answer(await asyncio.shield(done), status=200)


def _answer(changed: RoleChanged, *, status: int) -> Response:
    fields = {name: value for name, value in dataclasses.asdict(changed).items() if value is not None}
    return json_response({"success": True, **fields}, status=status)
