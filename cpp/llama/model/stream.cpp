#include "model/stream.h"

#include "ggml-backend-impl.h"
#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <cstring>
#include <map>

static constexpr size_t ALIGNMENT = 64;

//
// buffers: addresses for weights that are not there, and room for what else is put beside them (adapters)
//

namespace {

struct stream_buffer {
    std::shared_ptr<llama_stream> stream;
    void *                        base;
    size_t                        size;
};

stream_buffer & get(ggml_backend_buffer_t buffer) {
    return *static_cast<stream_buffer *>(buffer->context);
}

void buffer_free(ggml_backend_buffer_t buffer) {
    mixedkv::free_pages(get(buffer).base, get(buffer).size);
    delete &get(buffer);
}

void * buffer_base(ggml_backend_buffer_t buffer) {
    return get(buffer).base;
}

void buffer_memset(ggml_backend_buffer_t, ggml_tensor * tensor, uint8_t value, size_t offs, size_t size) {
    memset(static_cast<char *>(tensor->data) + offs, value, size);
}

void buffer_set(ggml_backend_buffer_t, ggml_tensor * tensor, const void * data, size_t offs, size_t size) {
    memcpy(static_cast<char *>(tensor->data) + offs, data, size);
}

void buffer_get(ggml_backend_buffer_t buffer, const ggml_tensor * tensor, void * data, size_t offs, size_t size) {
    if (!get(buffer).stream->read(tensor, data, offs, size)) {
        memcpy(data, static_cast<const char *>(tensor->data) + offs, size);
    }
}

void buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    memset(get(buffer).base, value, get(buffer).size);
}

ggml_backend_buffer_t buffer_alloc(ggml_backend_buffer_type_t buft, size_t size) {
    const size_t n = std::max<size_t>(size, 1);

    // pages that nobody writes to take no memory
    void * base = mixedkv::allocate_pages(n, true);
    if (!base) {
        return nullptr;
    }

    auto stream = static_cast<llama_stream *>(buft->context)->shared_from_this();

    const ggml_backend_buffer_i iface = {
        buffer_free, buffer_base, nullptr, buffer_memset, buffer_set, buffer_get, nullptr, nullptr, nullptr, buffer_clear, nullptr,
    };

    return ggml_backend_buffer_init(buft, iface, new stream_buffer{ std::move(stream), base, n }, size);
}

const char * buft_name(ggml_backend_buffer_type_t) {
    return "CPU_Stream";
}

size_t buft_alignment(ggml_backend_buffer_type_t) {
    return ALIGNMENT;
}

bool buft_is_host(ggml_backend_buffer_type_t) {
    return true;
}

} // namespace

//
// llama_stream
//

llama_stream::llama_stream(mixedkv::ring_settings settings, std::function<bool()> stop) :
    ring(settings), stop(std::move(stop)),
    type(new ggml_backend_buffer_type{ { buft_name, buffer_alloc, buft_alignment, nullptr, nullptr, buft_is_host }, nullptr, this }) {
}

llama_stream::~llama_stream() = default;

llama_stream * llama_stream::of(const ggml_tensor * tensor) {
    const ggml_backend_buffer_t buffer = tensor ? tensor->buffer : nullptr;

    return buffer && buffer->buft->iface.get_name == buft_name ? static_cast<llama_stream *>(buffer->buft->context) : nullptr;
}

void llama_stream::take(ggml_tensor * tensor, int fd, uint64_t offs) {
    int32_t il = -1;
    if (sscanf(ggml_get_name(tensor), "blk.%d.", &il) != 1) {
        throw std::runtime_error(format("%s belongs to no layer and cannot be streamed", ggml_get_name(tensor)));
    }

    if (files.find(fd) == files.end()) {
        files[fd] = ring.add_file(fd);
    }

    weight & w = weights[tensor];
    w.tensor = tensor;
    w.il     = il;
    w.file   = files[fd];
    w.offs   = offs;
    w.home   = tensor->data;
}

void llama_stream::start() {
    std::map<int32_t, layer> by_il;
    for (auto & it : weights) {
        by_il[it.second.il].weights.push_back(&it.second);
    }

    for (auto & it : by_il) {
        for (weight * w : it.second.weights) {
            w->layer = layers.size();
            ring.add(w->layer, w->file, w->offs, ggml_nbytes(w->tensor));
        }
        layers.push_back(std::move(it.second));
    }

    ring.start();

    for (auto & it : weights) {
        it.second.where = ring.where(it.second.layer, it.second.file, it.second.offs);
    }

    files.clear(); // the loader's descriptors
    started = true;
}

std::string llama_stream::admit(llama_context_params & params) {
    if (!started) {
        start();
    }

    params.op_offload = false; // would copy weights before they are there

    return "";
}

bool llama_stream::read(const ggml_tensor * tensor, void * to, uint64_t offs, uint64_t size) {
    const auto it = weights.find(tensor);
    if (it == weights.end()) {
        return false;
    }
    ring.read(it->second.file, it->second.offs + offs, size, to);

    return true;
}

void llama_stream::fail(outcome how, const std::string & why) {
    last    = how;
    problem = why;
}

llama_stream::outcome llama_stream::take_outcome(std::string & reason) {
    const std::lock_guard<std::mutex> lock(turn); // another context's graph may be failing

    const outcome res = last;

    reason = problem;
    last   = outcome::good;
    problem.clear();

    return res;
}

// a layer begins, and with it a pass if it is not behind the latest one
void llama_stream::count(size_t layer) {
    if (layer <= latest || n_passes == 0) {
        ++n_passes;
        mark = ggml_time_us()/1e6;
    }
    latest = layer;
    count();
}

void llama_stream::count() {
    const double now = ggml_time_us()/1e6;
    seconds = seconds + (now - mark);
    mark = now;
}

// Brings the weights' layer. True: all of what came before can go once this node has been computed.
bool llama_stream::use(weight & w) {
    layer & l = layers[w.layer];

    if (std::find(held.begin(), held.end(), w.layer) == held.end()) {
        const uint8_t * base = nullptr;
        count(w.layer);
        try {
            base = ring.hold(w.layer, stop);
        } catch (const mixedkv::interrupted_error & err) {
            fail(outcome::interrupted, err.what());
        } catch (const std::exception & err) {
            fail(outcome::unreadable, err.what());
        }
        for (weight * other : l.weights) { // whatever is computed before the end takes effect reads zeros
            other->tensor->data = last == outcome::good ? (void *) (uintptr_t(base) + other->where) : other->home;
        }
        if (last != outcome::good) {
            return true;
        }
        held.push_back(w.layer);
        l.n_seen = 0;
        l.hold   = ++n_holds;
    }

    if (w.seen != l.hold) {
        w.seen = l.hold;
        ++l.n_seen;
    }

    return l.n_seen == l.weights.size() || held.size() > 1;
}

bool llama_stream::before(ggml_tensor * node) {
    bool res = false;

    if (node->op == GGML_OP_VIEW || node->op == GGML_OP_RESHAPE || node->op == GGML_OP_PERMUTE || node->op == GGML_OP_TRANSPOSE) {
        return false;
    }

    for (int i = 0; i < GGML_MAX_SRC && node->src[i]; ++i) {
        ggml_tensor * src  = node->src[i];
        ggml_tensor * root = src->view_src ? src->view_src : src;
        if (of(root) != this) {
            continue;
        }
        const auto it = weights.find(root);
        if (it == weights.end()) {
            continue;
        }
        if (whose != std::this_thread::get_id()) { // the first one of a graph
            turn.lock();
            whose = std::this_thread::get_id();
        }
        if (last != outcome::good) {
            break;
        }
        res = use(it->second) || res;
        if (src != root) {
            src->data = static_cast<char *>(root->data) + src->view_offs;
        }
    }

    return res || (whose == std::this_thread::get_id() && last != outcome::good);
}

// Gives back the layers that all weights have been used of, and those before the last one.
llama_eval_listener::verdict llama_stream::after(ggml_tensor *) {
    count();
    while (!held.empty()) {
        const layer & l = layers[held.front()];
        if (held.size() == 1 && l.n_seen < l.weights.size()) {
            break;
        }
        ring.release(held.front());
        held.erase(held.begin());
    }

    if (last == outcome::good && stop && stop()) {
        fail(outcome::interrupted, "interrupted");
    }

    return last == outcome::good ? verdict::go_on : verdict::fail;
}

void llama_stream::end_graph() {
    if (whose == std::this_thread::get_id()) {
        whose = std::thread::id();
        turn.unlock();
    }
}

int llama_stream::lock(const llama_model & model, uint64_t & n_locked, uint64_t & n_bytes) {
    const uint64_t n_ring = ring.stats().bytes_ring;

    int res  = ring.lock();
    n_bytes  = n_ring;
    n_locked = res ? 0 : n_ring;

    for (const auto & it : llama_internal_get_tensor_map(&model)) {
        const ggml_tensor * t = it.second;
        const bool routed = it.first.find("_exps.") != std::string::npos; // a token needs few of them
        if (of(t) || routed || !t->buffer || !ggml_backend_buffer_is_host(t->buffer)) {
            continue;
        }
        n_bytes += ggml_nbytes(t);
        const int problem = mixedkv::lock_pages(t->data, ggml_nbytes(t));
        if (!problem) {
            n_locked += ggml_nbytes(t);
        } else if (!res) {
            res = problem;
        }
    }

    return res;
}

//
// what llama.cpp calls
//

bool llama_stream_takes(ggml_tensor * tensor, int fd, size_t offs, size_t & size_done) {
    llama_stream * stream = llama_stream::of(tensor);
    if (stream) {
        stream->take(tensor, fd, offs);
        size_done += ggml_nbytes(tensor);
    }

    return stream;
}

static llama_stream * find(const llama_model & model) {
    for (const auto & it : llama_internal_get_tensor_map(&model)) {
        if (llama_stream * res = llama_stream::of(it.second)) {
            return res;
        }
    }

    return nullptr;
}

std::string llama_stream_admit(const llama_model & model, llama_context_params & params) {
    llama_stream * stream = find(model);
    try {
        return stream ? stream->admit(params) : "";
    } catch (const std::exception & err) {
        return err.what();
    }
}

llama_eval_listener * llama_stream_listener(const llama_model & model) {
    return find(model);
}

llama_stream_loan::llama_stream_loan(ggml_tensor * tensor) : tensor(tensor), home(tensor->data) {
    if (llama_stream * stream = llama_stream::of(tensor)) {
        data.resize(ggml_nbytes(tensor));
        if (stream->read(tensor, data.data(), 0, data.size())) {
            tensor->data = data.data();
        }
    }
}

llama_stream_loan::~llama_stream_loan() {
    tensor->data = home;
}
