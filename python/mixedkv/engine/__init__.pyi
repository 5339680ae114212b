"""All that `mixedkv.engine` exports. `__init__.py` reads the names here, and so do type checkers and
tests/lint/check_modules.py, which allows 25.
"""

from mixedkv.constrain.constraint_text import Constraint as Constraint
from mixedkv.engine.answer import Answer as Answer
from mixedkv.engine.chat.chat_template import Chat as Chat
from mixedkv.engine.chat.chat_template import RenderedChat as RenderedChat
from mixedkv.engine.chat.chat_template import TemplateOptions as TemplateOptions
from mixedkv.engine.chat.chat_template import ToolChoice as ToolChoice
from mixedkv.engine.chat.tokenizer import Tokenizer as Tokenizer
from mixedkv.engine.connectors.chunk_connector import ChunkConnector as ChunkConnector
from mixedkv.engine.connectors.store_connector import StoreConnector as StoreConnector
from mixedkv.engine.embed.embedder import Embedder as Embedder
from mixedkv.engine.engine import Engine as Engine
from mixedkv.engine.generation import Generation as Generation
from mixedkv.engine.inbox import deliver_directly as deliver_directly
from mixedkv.engine.jobs.job import Delta as Delta
from mixedkv.engine.jobs.job import Done as Done
from mixedkv.engine.jobs.job import Failed as Failed
from mixedkv.engine.jobs.job import Job as Job
from mixedkv.engine.prompt_cache import PromptCache as PromptCache
from mixedkv.engine.sample.sampler import TokenLogprob as TokenLogprob
from mixedkv.engine.sample.sampling import Sampling as Sampling
from mixedkv.engine.schedule.contract import Observer as Observer
from mixedkv.engine.schedule.progress import Progress as Progress
from mixedkv.engine.schedule.request import Request as Request
from mixedkv.engine.text.answer_reader import Part as Part
from mixedkv.work.turns import TenantLimits as TenantLimits
