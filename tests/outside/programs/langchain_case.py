"""The standard integration tests of LangChain over its client for OpenAI's protocol. Run by pytest, outside."""

import os

from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestChat(ChatModelIntegrationTests):
    @property
    def chat_model_class(self):
        return ChatOpenAI

    @property
    def chat_model_params(self):
        model, url = os.environ["MODEL"], os.environ["BASE_URL"]
        client = {"base_url": url, "api_key": "none", "max_retries": 0, "timeout": 60, "stream_usage": True}
        return {"model": model, "temperature": 0, "max_tokens": 400, **client}

    @property
    def supports_json_mode(self):
        return True

    @property
    def model_override_value(self):
        return "another-name"
