# Compress a model, and serve it from an image that has neither PyTorch nor a compiler.
#
#     docker build -t model .                                    # the quickstart
#     docker run --rm -p 127.0.0.1:8000:8000 model               # OpenAI's API at http://127.0.0.1:8000/v1
#     docker build -t model --build-arg RECIPE=smoothquant_w8a8_x86 --build-arg "OPTIONS=--set target={x86:{isa:AVX2}}" .
#     docker build -t compressor --target compressor . && docker run --rm compressor list recipes
#
# Kernels are for the instruction set of the machine that builds; OPTIONS names another.  docs/ci.md says more.

FROM python:3.11-slim-bookworm AS compressor
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir 'torch>=2.10,<2.14' --index-url https://download.pytorch.org/whl/cpu
WORKDIR /src
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY compressor compressor
COPY recipes recipes
COPY calibration calibration
COPY export export
COPY models/reference models/reference
RUN pip install --no-cache-dir .
WORKDIR /work
ENTRYPOINT ["compress"]
CMD ["--help"]

FROM compressor AS bundle
ARG RECIPE=quickstart
ARG OPTIONS="--set speculate=lookup"
RUN compress run "$RECIPE" $OPTIONS -o /bundle \
 && compress verify /bundle

FROM python:3.11-slim-bookworm AS serve
RUN pip install --no-cache-dir numpy tokenizers apache-tvm-ffi==0.1.14.post1 'jinja2>=3.1' 'starlette>=0.46' 'uvicorn>=0.34'
COPY --from=bundle /bundle /bundle
USER nobody
WORKDIR /bundle
EXPOSE 8000
HEALTHCHECK --start-period=30s CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["python", "-m", "compressor_runtime.server", "--host", "0.0.0.0"]
