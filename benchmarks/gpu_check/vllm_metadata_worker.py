"""Workers of vLLM as the producer extends them, with vLLM's own LoRA metadata: what `producer.engine.lora_metadata` is compared
with."""

from producer.engine.adapter_worker import AdapterLoader, AdapterWorker


class VllmMetadataWorker(AdapterWorker):
    def loading_start(self) -> None:
        self._loading = AdapterLoader(self.model_runner.lora_manager)  # type: ignore[attr-defined]
