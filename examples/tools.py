"""Let a model call functions of this program until it answers, and print both.

mstarctl up llm:mini -d
python examples/tools.py "What is the weather in Oslo?" [URL]
"""

from __future__ import annotations

import json
import sys
import time

from mstar_core import MStarClient


def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return "foggy"


def get_time(city: str) -> str:
    """Return the time of a city, here that of this machine."""
    return time.strftime("%H:%M")


FUNCTIONS = {"get_weather": get_weather, "get_time": get_time}
DESCRIPTIONS = {"get_weather": "Weather of a city", "get_time": "Local time of a city"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"name": name, "description": text, "parameters": CITY} for name, text in DESCRIPTIONS.items()]

if len(sys.argv) < 2:
    print(__doc__, file=sys.stderr)
    sys.exit(2)
prompt, *address = sys.argv[1:]
messages = [{"role": "user", "content": prompt}]
with MStarClient(*address) as client:
    while (answer := client.converse(messages, tools=TOOLS, temperature=0)).tool_calls:
        messages.append(answer.message)
        for call in answer.tool_calls:
            result = FUNCTIONS[call.name](**call.values)
            print(f"{call.name}({call.arguments}) returns {result}")
            messages.append(call.result(json.dumps({"result": result})))
print(answer.content)
