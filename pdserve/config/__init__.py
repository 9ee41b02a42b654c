"""Configuration: one frozen dataclass per group; the annotations generate the command line (`cli`)."""

from pdserve.config.groups import (
    DisaggConfig,
    DisaggMode,
    KernelConfig,
    MemoryConfig,
    ModelConfig,
    ObserveConfig,
    ScheduleConfig,
    ServerConfig,
    ServingConfig,
)

__all__ = [
    "DisaggConfig",
    "DisaggMode",
    "KernelConfig",
    "MemoryConfig",
    "ModelConfig",
    "ObserveConfig",
    "ScheduleConfig",
    "ServerConfig",
    "ServingConfig",
]
