"""A killed worker of a served model comes back as the standby process, and serves as before."""

from __future__ import annotations

from tests.runtime.client import SURE, new_client, request, speak
from tests.runtime.deployment import Deployment, until

SHORT = request(**SURE, max_output_tokens=60)


async def test_the_standby_process_becomes_the_worker_and_serves() -> None:
    with Deployment(standby=True) as deployment:
        async with new_client(deployment.url) as client:
            before = await speak(client, SHORT)
        until(lambda: deployment.has_event("standby.ready"), "the standby process")
        snapshot = deployment.snapshot()["children"]
        standby, worker = snapshot["standby"], snapshot["worker-0"]
        assert "standby " in deployment.shown("describe", deployment.name)
        deployment.kill(worker["pid"])
        after = deployment.wait_again_ready(1)["children"]["worker-0"]
        assert (after["pid"], after["incarnation"]) == (standby["pid"], 2)
        async with new_client(deployment.url) as client:
            heard = await speak(client, SHORT)
        assert heard.is_whole and heard.pcm == before.pcm
        assert deployment.has_event("child.spawned", child="worker-0", incarnation=2, standby=True)
        deployment.assert_clean()
