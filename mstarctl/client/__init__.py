"""Access of commands to deployments: admin sockets, run directories, logs, other hosts."""

from __future__ import annotations

from mstarctl.client.admin import AdminClient
from mstarctl.client.deployments import Known, find_known, known_deployments
from mstarctl.client.log_lines import LogLine, LogQuery, read_logs

__all__ = ["AdminClient", "Known", "LogLine", "LogQuery", "find_known", "known_deployments", "read_logs"]
