"""The wire between processes: generated from laneproto/v1/*.proto by scripts/gen-proto."""
