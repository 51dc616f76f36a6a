"""LangChain's own suite for chat models, through ``ChatOpenAI``.

Tool calls are checked against the scripted server: the embedded model was not trained on tools.
"""

import pytest
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class Common(ChatModelIntegrationTests):
    url = ""
    served = ""

    @pytest.fixture(autouse=True)
    def _point(self, request):
        name = "scripted" if self.served == "scripted" else "server"
        type(self).url = request.getfixturevalue(name)

    @property
    def chat_model_class(self):
        return ChatOpenAI

    @property
    def chat_model_params(self):
        url = f"{self.url}/v1"
        return {"base_url": url, "api_key": "none", "model": self.served, "max_retries": 0}

    @property
    def has_tool_choice(self):
        return False

    @property
    def supports_image_inputs(self):
        return False

    @property
    def has_structured_output(self):
        return False


class TestReasoner(Common):
    served = "reasoner"

    @property
    def has_tool_calling(self):
        return False


class TestScripted(Common):
    served = "scripted"

    @property
    def has_tool_calling(self):
        return True
