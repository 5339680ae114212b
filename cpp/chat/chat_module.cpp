// mixedkv._chat: llama.cpp's chat layer, which knows how each family of models is told of tools and how it calls them.
// Requests and messages cross as OpenAI's JSON. Its types are in python/mixedkv/_chat.pyi.

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function" // clang counts what the header has
#include "chat.h"
#pragma GCC diagnostic pop

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace py = pybind11;
using namespace py::literals;

namespace {

// A rendered chat, and how its answer is to be read.
class chat_prompt {
  public:
    explicit chat_prompt(common_chat_params params) : params(std::move(params)), reading(this->params) {
        reading.reasoning_format = COMMON_REASONING_FORMAT_DEEPSEEK;
        if (!this->params.parser.empty()) {
            reading.parser.load(this->params.parser);
        }
    }

    // The assistant's message as JSON; of an answer that goes on, what is certain of it.
    std::string parse(const std::string & answer, bool partial) const {
        common_chat_msg message = common_chat_parse(answer, partial, reading);
        common_json     calls   = common_json::array();
        for (const auto & call : message.tool_calls) {
            calls.push_back({ { "id", call.id }, { "name", call.name }, { "arguments", call.arguments } });
        }
        common_json out   = { { "content", message.content }, { "reasoning_content", message.reasoning_content } };
        out["tool_calls"] = std::move(calls);
        return out.dump();
    }

    // Where an answer that may call begins a call; empty where llama.cpp has other triggers than words.
    std::vector<std::string> triggers() const {
        std::vector<std::string> words;
        for (const auto & trigger : params.grammar_triggers) {
            if (trigger.type != COMMON_GRAMMAR_TRIGGER_TYPE_WORD) {
                return {};
            }
            words.push_back(trigger.value);
        }
        return params.grammar_lazy ? words : std::vector<std::string>();
    }

    common_chat_params params;

  private:
    common_chat_parser_params reading;
};

class chat_template {
  public:
    chat_template(const std::string & source, const std::string & bos, const std::string & eos) :
        templates(common_chat_templates_init(nullptr, source, bos, eos)) {}

    // Of `variables` each value is JSON. With `continues` the last message is the answer's beginning.
    chat_prompt apply(const std::string & messages, const std::string & tools, const std::string & tool_choice,
                      bool parallel, bool thinking, std::map<std::string, std::string> variables,
                      bool continues) const {
        common_chat_templates_inputs inputs;
        inputs.messages             = common_chat_msgs_parse_oaicompat(common_json::parse(messages));
        inputs.tools                = common_chat_tools_parse_oaicompat(common_json::parse(tools));
        inputs.tool_choice          = common_chat_tool_choice_parse_oaicompat(tool_choice);
        inputs.parallel_tool_calls  = parallel;
        inputs.enable_thinking      = thinking;
        inputs.reasoning_format     = COMMON_REASONING_FORMAT_DEEPSEEK;
        inputs.chat_template_kwargs = std::move(variables);
        if (continues) {
            inputs.continue_final_message = COMMON_CHAT_CONTINUATION_AUTO;
            inputs.add_generation_prompt  = false;
        }
        return chat_prompt(common_chat_templates_apply(templates.get(), inputs));
    }

  private:
    common_chat_templates_ptr templates;
};

} // namespace

PYBIND11_MODULE(_chat, m) {
    m.doc() = "llama.cpp's chat templates and parsers of answers (private)";

    // Neither class is written to once made: any number of threads may use one.
    py::class_<chat_prompt>(m, "ChatPrompt")
        .def_property_readonly("prompt", [](const chat_prompt & self) { return self.params.prompt; })
        .def_property_readonly("opening", [](const chat_prompt & self) { return self.params.generation_prompt; })
        .def_property_readonly("grammar", [](const chat_prompt & self) { return self.params.grammar; })
        .def_property_readonly("parser", [](const chat_prompt & self) { return self.params.parser; })
        .def_property_readonly("preserved", [](const chat_prompt & self) { return self.params.preserved_tokens; })
        .def_property_readonly("triggers", &chat_prompt::triggers)
        .def_property_readonly("stops", [](const chat_prompt & self) { return self.params.additional_stops; })
        .def_property_readonly("thinking_start",
                               [](const chat_prompt & self) { return self.params.thinking_start_tag; })
        .def_property_readonly("thinking_ends", [](const chat_prompt & self) { return self.params.thinking_end_tags; })
        .def("parse", &chat_prompt::parse, "answer"_a, "partial"_a, py::call_guard<py::gil_scoped_release>());

    py::class_<chat_template>(m, "ChatTemplate")
        .def(py::init<const std::string &, const std::string &, const std::string &>(), "source"_a, "bos"_a, "eos"_a,
             py::call_guard<py::gil_scoped_release>())
        .def("apply", &chat_template::apply, "messages"_a, "tools"_a, "tool_choice"_a, "parallel"_a, "thinking"_a,
             "variables"_a, "continues"_a, py::call_guard<py::gil_scoped_release>());
}
