from pdserve.llm import LLM as LLM
from pdserve.llm import BatchError as BatchError
from pdserve.llm import CompletionOutput as CompletionOutput
from pdserve.llm import EmbeddingOutput as EmbeddingOutput
from pdserve.llm import EmbeddingRequestOutput as EmbeddingRequestOutput
from pdserve.llm import InvalidRequestError as InvalidRequestError
from pdserve.llm import Logprob as Logprob
from pdserve.llm import PoolingParams as PoolingParams
from pdserve.llm import RequestOutput as RequestOutput
from pdserve.llm import SamplingParams as SamplingParams
from pdserve.llm import ScoringOutput as ScoringOutput
from pdserve.llm import ScoringRequestOutput as ScoringRequestOutput

__version__: str
OFFLINE_API: tuple[str, ...]
