// How fast a device is with each cache, and how far its logits are from the CPU's.
//
//   device_speed speed MODEL --kv f16 --kv mixed [--depths 0,4096] [--n-gen 64] [--rounds 3] [--sequences 1]
//   device_speed check MODEL --kv mixed [--tokens 400]
//
// A cache is one of llama.cpp's types, or a spec of the mixed cache as MIXEDKV_KV takes it (cpp/tools). Caches take
// turns, every other round in reverse order. At each depth a prompt of 512 tokens and then tokens one by one are timed.
// `check` compares with the CPU's `attention=merged`: the RMS of what logits differ by, of their spread, the mean
// divergence in nats, and how often the likeliest token is the same.

#include <llama.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr int micro_batch = 512;

struct options {
    std::string              mode, model;
    std::vector<std::string> kv;
    std::vector<int>         depths{ 0, 4096, 16384, 32768 };
    int                      n_gen = 64, rounds = 3, sequences = 1, tokens = 400;
};

std::vector<int> numbers(const std::string & text) {
    std::vector<int> res;
    for (size_t at = 0; at < text.size(); at = std::min(text.find(',', at), text.size() - 1) + 1) {
        res.push_back(std::atoi(text.c_str() + at));
    }
    return res;
}

options parse(int argc, char ** argv) {
    options o;
    if (argc < 3) {
        throw std::invalid_argument("give speed or check, and a model");
    }
    o.mode  = argv[1];
    o.model = argv[2];
    for (int i = 3; i + 1 < argc; i += 2) {
        const std::string name = argv[i], value = argv[i + 1];
        if (name == "--kv") {
            o.kv.push_back(value);
        } else if (name == "--depths") {
            o.depths = numbers(value);
        } else if (name == "--n-gen") {
            o.n_gen = std::atoi(value.c_str());
        } else if (name == "--rounds") {
            o.rounds = std::atoi(value.c_str());
        } else if (name == "--sequences") {
            o.sequences = std::atoi(value.c_str());
        } else if (name == "--tokens") {
            o.tokens = std::atoi(value.c_str());
        } else {
            throw std::invalid_argument("unknown option " + name);
        }
    }
    return o;
}

llama_model * load(const std::string & path, int n_gpu_layers) {
    llama_model_params params = llama_model_default_params();
    params.n_gpu_layers       = n_gpu_layers;
    llama_model * model       = llama_model_load_from_file(path.c_str(), params);
    if (!model) {
        throw std::runtime_error("cannot load " + path);
    }
    return model;
}

struct context {
    llama_context * ctx;
    int             n_vocab;

    context(llama_model * model, const std::string & kv, int n_ctx, int n_seq) {
        llama_context_params params = llama_context_default_params();
        params.n_ctx                = n_ctx;
        params.n_batch              = micro_batch;
        params.n_ubatch             = micro_batch;
        params.n_seq_max            = n_seq;
        params.kv_unified           = true;
        params.n_threads = params.n_threads_batch = std::getenv("THREADS") ? std::atoi(std::getenv("THREADS")) : 1;
        params.flash_attn_type                    = LLAMA_FLASH_ATTN_TYPE_ENABLED;
        params.no_perf                            = true;
        setenv("MIXEDKV_KV", kv.c_str(), 1);
        ctx     = llama_init_from_model(model, params);
        n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
        if (!ctx) {
            throw std::runtime_error("no context with " + kv);
        }
    }

    context(const context &) = delete;

    ~context() { llama_free(ctx); }

    // tokens of a sequence from a position on; all: logits of each of them
    void decode(const std::vector<int> & tokens, int pos, int seq, bool all) {
        for (size_t first = 0; first < tokens.size(); first += micro_batch) {
            const int   n     = int(std::min(tokens.size() - first, size_t(micro_batch)));
            llama_batch batch = llama_batch_init(n, 0, 1);
            for (int i = 0; i < n; i++) {
                add(batch, tokens[first + i], pos + int(first) + i, seq, all || first + i + 1 == tokens.size());
            }
            run(batch);
        }
    }

    // one token of each sequence
    void decode_together(const std::vector<int> & tokens, int pos) {
        llama_batch batch = llama_batch_init(int(tokens.size()), 0, 1);
        for (size_t i = 0; i < tokens.size(); i++) {
            add(batch, tokens[i], pos, int(i), true);
        }
        run(batch);
    }

    void cut(int pos) { llama_memory_seq_rm(llama_get_memory(ctx), -1, pos, -1); }

    // of the last batch
    std::vector<float> logits(int n) {
        llama_synchronize(ctx);
        std::vector<float> res;
        for (int i = 0; i < n; i++) {
            const float * row = llama_get_logits_ith(ctx, i);
            res.insert(res.end(), row, row + n_vocab);
        }
        return res;
    }

  private:
    static void add(llama_batch & b, int token, int pos, int seq, bool out) {
        b.token[b.n_tokens]     = token;
        b.pos[b.n_tokens]       = pos;
        b.n_seq_id[b.n_tokens]  = 1;
        b.seq_id[b.n_tokens][0] = seq;
        b.logits[b.n_tokens]    = out;
        b.n_tokens++;
    }

    void run(llama_batch & batch) {
        const int status = llama_decode(ctx, batch);
        llama_batch_free(batch);
        if (status) {
            throw std::runtime_error("llama_decode says " + std::to_string(status));
        }
    }
};

std::vector<int> random_tokens(int n, int n_vocab, uint32_t seed) {
    std::mt19937     r(seed);
    std::vector<int> res(n);
    for (int & t : res) {
        t = 3 + int(r() % uint32_t(n_vocab - 3));
    }
    return res;
}

double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct times {
    double prompt, token;
};

times measure(context & c, int depth, int n_gen, int n_seq) {
    times res;
    llama_synchronize(c.ctx);
    double begin = seconds();
    c.decode(random_tokens(micro_batch, c.n_vocab, 2), depth, 0, false);
    llama_synchronize(c.ctx);
    res.prompt = seconds() - begin;
    c.cut(depth);
    const auto tokens = random_tokens((n_gen + 4) * n_seq, c.n_vocab, 3);
    for (int i = 0; i < n_gen + 4; i++) {
        if (i == 4) { // graphs of this shape have been made
            begin = seconds();
        }
        c.decode_together({ tokens.begin() + i * n_seq, tokens.begin() + (i + 1) * n_seq }, depth + i);
        llama_synchronize(c.ctx);
    }
    res.token = (seconds() - begin) / n_gen;
    c.cut(depth);
    return res;
}

double median(std::vector<double> x) {
    std::sort(x.begin(), x.end());
    return x[x.size() / 2];
}

// MiB of the first GPU that are taken, by whom ever
double device_use() {
    ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_GPU);
    size_t             free = 0, total = 0;
    if (device) {
        ggml_backend_dev_memory(device, &free, &total);
    }
    return double(total - free) / (1 << 20);
}

void speed(const options & o) {
    llama_model * model = load(o.model, 99);
    const int n_ctx = (*std::max_element(o.depths.begin(), o.depths.end()) + micro_batch + o.n_gen + 8) * o.sequences;

    std::vector<std::unique_ptr<context>> contexts;
    for (const auto & kv : o.kv) {
        const double before = device_use();
        contexts.push_back(std::make_unique<context>(model, kv, n_ctx, o.sequences));
        measure(*contexts.back(), 0, 1, o.sequences);
        std::printf("%s: %.0f MiB for %d tokens\n", kv.c_str(), device_use() - before, n_ctx);
    }
    int filled = 0;
    for (const int depth : o.depths) {
        for (auto & c : contexts) {
            for (int seq = 0; seq < o.sequences; seq++) {
                c->decode(random_tokens(depth - filled, c->n_vocab, depth + seq), filled, seq, false);
            }
        }
        filled = depth;
        std::vector<std::vector<times>> rounds(contexts.size());
        for (int round = 0; round < o.rounds + 1; round++) {
            for (size_t i = 0; i < contexts.size(); i++) {
                const size_t at = round % 2 ? contexts.size() - 1 - i : i;
                const times  t  = measure(*contexts[at], depth, o.n_gen, o.sequences);
                if (round > 0) { // the first warms up
                    rounds[at].push_back(t);
                }
            }
        }
        std::printf("| at %d, %d sequences | prompt tok/s | x %s | tok/s | x %s |\n|---|---|---|---|---|\n", depth,
                    o.sequences, o.kv[0].c_str(), o.kv[0].c_str());
        for (size_t i = 0; i < contexts.size(); i++) {
            std::vector<double> prompt, token, prompt_x, token_x;
            for (size_t round = 0; round < rounds[i].size(); round++) {
                prompt.push_back(micro_batch / rounds[i][round].prompt);
                token.push_back(o.sequences / rounds[i][round].token);
                prompt_x.push_back(rounds[0][round].prompt / rounds[i][round].prompt);
                token_x.push_back(rounds[0][round].token / rounds[i][round].token);
            }
            std::printf("| %s | %.0f | %.2f | %.1f | %.2f |\n", o.kv[i].c_str(), median(prompt), median(prompt_x),
                        median(token), median(token_x));
        }
        std::fflush(stdout);
    }
}

// A prompt in three micro-batches, tokens one by one, five at once, then three sequences side by side
std::vector<float> evaluate(llama_model * model, const std::string & kv, int n_tokens) {
    context            c(model, kv, 2 * n_tokens + 512, 3);
    const auto         tokens = random_tokens(n_tokens, c.n_vocab, 7);
    std::vector<float> res;
    const auto         keep = [&](int n) {
        const auto logits = c.logits(n);
        res.insert(res.end(), logits.begin(), logits.end());
    };
    int at = 0;
    for (const int n : { n_tokens / 2, n_tokens / 4, 1, 1, 1, 1, 5, n_tokens / 8 }) {
        c.decode({ tokens.begin() + at, tokens.begin() + at + n }, at, 0, true);
        keep(n);
        at += n;
    }
    for (int seq = 1; seq < 3; seq++) {
        c.decode({ tokens.begin() + seq, tokens.begin() + seq + at }, 0, seq, false);
    }
    for (int i = 0; i < 4; i++) {
        c.decode_together({ tokens[i], tokens[i + 1], tokens[i + 2] }, at + i);
        keep(3);
    }
    return res;
}

void check(const options & o) {
    llama_model *cpu = load(o.model, 0), *device = load(o.model, 99);
    const int    n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(cpu));
    std::printf("| %s | RMS | divergence | same token |\n|---|---|---|---|\n", o.model.c_str());
    for (const auto & kv : o.kv) {
        const auto want = evaluate(cpu, kv, o.tokens), got = evaluate(device, kv, o.tokens);
        double     sum = 0.0, square = 0.0, difference = 0.0, divergence = 0.0;
        int        same = 0;
        const int  n    = int(want.size() / n_vocab);
        for (int i = 0; i < n; i++) {
            const float *a = want.data() + size_t(i) * n_vocab, *b = got.data() + size_t(i) * n_vocab;
            const float  max_a = *std::max_element(a, a + n_vocab), max_b = *std::max_element(b, b + n_vocab);
            double       za = 0.0, zb = 0.0;
            for (int j = 0; j < n_vocab; j++) {
                sum += a[j];
                square += double(a[j]) * a[j];
                difference += (double(a[j]) - b[j]) * (double(a[j]) - b[j]);
                za += std::exp(double(a[j]) - max_a);
                zb += std::exp(double(b[j]) - max_b);
            }
            for (int j = 0; j < n_vocab; j++) {
                const double pa = (a[j] - max_a) - std::log(za), pb = (b[j] - max_b) - std::log(zb);
                divergence += std::exp(pa) * (pa - pb) / n;
            }
            same += std::max_element(a, a + n_vocab) - a == std::max_element(b, b + n_vocab) - b;
        }
        const double all = double(want.size()), spread = square / all - sum / all * sum / all;
        std::printf("| %s | %.2e | %.2e | %d of %d |\n", kv.c_str(), std::sqrt(difference / all / spread), divergence,
                    same, n);
        std::fflush(stdout);
    }
}

} // namespace

int main(int argc, char ** argv) {
    try {
        const options o = parse(argc, argv);
        llama_log_set(
            [](ggml_log_level level, const char * text, void *) {
                if (level >= GGML_LOG_LEVEL_WARN || std::getenv("VERBOSE")) {
                    std::fputs(text, stderr);
                }
            },
            nullptr);
        ggml_backend_load_all();
        o.mode == "check" ? check(o) : speed(o);
    } catch (const std::exception & error) {
        std::fprintf(stderr, "device_speed: %s\n", error.what());
        return 1;
    }
    return 0;
}
