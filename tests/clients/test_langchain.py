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
        fields = {"base_url": url, "api_key": "none", "model": self.served, "max_retries": 0}
        return {**fields, "stream_usage": True}

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

    @pytest.mark.xfail(reason="the script has no answer for its question")
    def test_bind_runnables_as_tools(self, model):
        super().test_bind_runnables_as_tools(model)

    @pytest.mark.xfail(reason="the script has no answer for its question")
    def test_agent_loop(self, model):
        super().test_agent_loop(model)

    @pytest.mark.xfail(reason="the script has no answer for its question")
    def test_unicode_tool_call_integration(self, model):
        super().test_unicode_tool_call_integration(model)
