"""Configuration: one frozen dataclass per group; the annotations generate the command line (`cli`)."""

from pdserve.config.access_group import AccessConfig
from pdserve.config.groups import (
    DisaggConfig,
    DisaggMode,
    KernelConfig,
    MemoryConfig,
    ModelConfig,
    ObserveConfig,
    ServerConfig,
    ServingConfig,
)
from pdserve.config.schedule_group import ScheduleConfig
from pdserve.config.speculative_group import SpeculativeConfig

__all__ = [
    "AccessConfig",
    "DisaggConfig",
    "DisaggMode",
    "KernelConfig",
    "MemoryConfig",
    "ModelConfig",
    "ObserveConfig",
    "ScheduleConfig",
    "ServerConfig",
    "ServingConfig",
    "SpeculativeConfig",
]
