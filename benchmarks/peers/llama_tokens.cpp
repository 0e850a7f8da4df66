// Continue token ids with llama.cpp's likeliest ones, on one thread: llama_tokens MODEL.gguf 1,2,3 COUNT
// Everything else is llama.cpp's default. New ids are printed as compressor_run prints them.
#include <llama.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

int main(int argc, char** argv) {
  if (argc != 4) return std::fprintf(stderr, "usage: llama_tokens MODEL.gguf 1,2,3 COUNT\n"), 2;
  llama_log_set([](ggml_log_level level, const char* text, void*) {
    if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
  }, nullptr);
  std::vector<llama_token> tokens;
  std::istringstream list(argv[2]);
  for (std::string one; std::getline(list, one, ',');) tokens.push_back(std::atoi(one.c_str()));
  llama_model* model = llama_model_load_from_file(argv[1], llama_model_default_params());
  if (model == nullptr) return 1;
  llama_context_params parameters = llama_context_default_params();
  parameters.n_ctx = 1024;
  parameters.n_threads = parameters.n_threads_batch = 1;
  llama_context* context = llama_init_from_model(model, parameters);
  if (context == nullptr) return 1;
  int count = llama_vocab_n_tokens(llama_model_get_vocab(model));
  for (int made = 0; made < std::atoi(argv[3]); ++made) {
    if (llama_decode(context, llama_batch_get_one(tokens.data(), int(tokens.size()))) != 0) return 1;
    const float* logits = llama_get_logits_ith(context, -1);
    tokens.assign(1, llama_token(std::max_element(logits, logits + count) - logits));
    std::printf(made == 0 ? "%d" : ",%d", tokens[0]);
  }
  std::printf("\n");
}
