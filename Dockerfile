# `mixedkv serve` for any processor of the platform. Mount a model, and a volume for kept KV. For this machine alone, without keys:
#   docker build -t mixedkv .
#   docker run --stop-timeout 100 -p 127.0.0.1:8000:8000 -v ./model.gguf:/models/model.gguf:ro -v kv:/kv mixedkv serve --allow-no-keys
FROM python:3.12-slim-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ git && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
RUN CMAKE_ARGS=-DMIXEDKV_PORTABLE=ON pip wheel --no-cache-dir --wheel-dir /wheels '.[server,redis,events]'

FROM python:3.12-slim-bookworm
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-index --find-links=/wheels 'mixedkv[server,redis,events]' && \
    useradd --uid 1000 --create-home mixedkv && install -d -o mixedkv /kv
USER mixedkv
ENV MIXEDKV_HOST=0.0.0.0 MIXEDKV_PORT=8000 MIXEDKV_MODEL=/models/model.gguf MIXEDKV_STORE=/kv
VOLUME /kv
EXPOSE 8000
HEALTHCHECK --start-period=5m CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["mixedkv"]
CMD ["serve"]
