// A port of flux_ref's training arithmetic to C++17, with the standard library only. Build, run and compare:
//
//     g++ -O2 -std=c++17 examples/cpp_port.cpp -o cpp_port
//     ./cpp_port tests/golden dump.safetensors
//     python -m tools.golden check --from dump.safetensors
//
// It was written from PORTING.md and the pages that it links, without a look at the code. As first written it also
// computed FP8, full.* and the log. They are left out for size; examples/jax_port.py computes FP8. Bad usage and
// damaged files stop the port with one line and exit code 2.
//
// A network computes one sample at a time, so every value is a matrix: rows are tokens, columns are features.
// Golden values of a batch are those of its samples, one after the other. Bytes are read and written least
// significant first, so the machine must store them so.

#include <functional>
#include <memory>

#include "cpp_port_files.h"

// ==== Step 1: draws (docs/draws.md) ==============================================================================
enum Stream { ORDER, SCALARS, LATENT, NOISE, VAL_LATENT, VAL_NOISE, INIT };
const double PI = 3.14159265358979323846;
const double DROP_RATE = 0.1;  // of captions in training

pair<Word, Word> multiply(Word a, Word b) {  // high and low 64 bits
    Word a0 = (uint32_t)a, a1 = a >> 32, b0 = (uint32_t)b, b1 = b >> 32;
    Word middle = a1 * b0 + (a0 * b0 >> 32), other = a0 * b1 + (uint32_t)middle;
    return {a1 * b1 + (middle >> 32) + (other >> 32), a * b};
}
array<Word, 4> philox(Word key0, Word key1, array<Word, 4> counter) {
    for (int round = 0; round < 10; round++) {
        auto [high0, low0] = multiply(0xD2E7470EE14C6C93, counter[0]);
        auto [high1, low1] = multiply(0xCA5A826395121157, counter[2]);
        counter = {high1 ^ counter[1] ^ key0, low1, high0 ^ counter[3] ^ key1, low0};
        key0 += 0x9E3779B97F4A7C15;
        key1 += 0xBB67AE8584CAA73B;
    }
    return counter;
}

// Words first .. first + count - 1 of a stream.
vector<Word> draw(Word seed, Word stream, Word sample, Word epoch, size_t count, Word first = 0) {
    require(count <= MAX_COUNT, "a draw is too large");
    vector<Word> words(count);
    array<Word, 4> block{};
    for (Word w = first; w < first + count; w++) {
        if (w == first || w % 4 == 0) block = philox(seed, stream, {w / 4 + 1, sample, epoch, 0});
        words[w - first] = block[w % 4];
    }
    return words;
}
Floats uniforms(const vector<Word>& words) {
    Floats values;
    for (Word word : words) values.push_back((float)(word >> 40) * 0x1p-24f);
    return values;
}
vector<double> box_muller(const vector<Word>& words) {  // an even number of words, before the results are rounded
    vector<double> values;
    for (size_t i = 0; i < words.size(); i += 2) {
        double a = (double)(words[i] >> 11), b = (double)(words[i + 1] >> 11);
        double radius = std::sqrt(-2 * std::log((a + 1) * 0x1p-53)), angle = 2 * PI * b * 0x1p-53;
        values.push_back(radius * std::cos(angle));
        values.push_back(radius * std::sin(angle));
    }
    return values;
}
Floats normals(Word seed, Word stream, Word sample, Word epoch, size_t count) {
    vector<double> values = box_muller(draw(seed, stream, sample, epoch, count + count % 2));
    return Floats(values.begin(), values.begin() + (std::ptrdiff_t)count);
}

// The distribution of t in training. The default is the benchmark's.
struct TimeDistribution {
    bool logit_normal = false;
    double mean = 0, width = 1, shift = 1;
};
float time_of(const vector<Word>& words, const TimeDistribution& of = {}) {  // words 0 to 3 of SCALARS
    double t = uniforms(words)[1];
    if (of.logit_normal) t = 1 / (1 + std::exp(-of.mean - of.width * box_muller(words)[2]));
    return (float)std::min(of.shift * t / (1 + (of.shift - 1) * t), 1 - 0x1p-24);
}

Word key_of(const string& name) {  // the first 8 bytes of SHA-256, least significant byte first
    static const uint32_t constants[64] = {
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98,
        0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786,
        0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8,
        0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13,
        0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819,
        0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a,
        0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7,
        0xc67178f2};
    uint32_t hash[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    auto rotate = [](uint32_t x, int n) { return x >> n | x << (32 - n); };
    string text = name + '\x80';
    while (text.size() % 64 != 56) text += '\0';
    for (int i = 7; i >= 0; i--) text += char((Word)name.size() * 8 >> (8 * i));
    for (size_t block = 0; block < text.size(); block += 64) {
        uint32_t w[64] = {}, s[8];
        for (int i = 0; i < 64; i++) w[i / 4] = w[i / 4] << 8 | (unsigned char)text[block + i];
        for (int i = 16; i < 64; i++)
            w[i] = w[i - 16] + (rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3) + w[i - 7]
                   + (rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10);
        std::copy(hash, hash + 8, s);
        for (int i = 0; i < 64; i++) {
            uint32_t t1 = s[7] + (rotate(s[4], 6) ^ rotate(s[4], 11) ^ rotate(s[4], 25))
                          + ((s[4] & s[5]) ^ (~s[4] & s[6])) + constants[i] + w[i];
            uint32_t t2 = (rotate(s[0], 2) ^ rotate(s[0], 13) ^ rotate(s[0], 22))
                          + ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
            for (int j = 7; j > 0; j--) s[j] = s[j - 1];
            s[4] += t1;
            s[0] = t1 + t2;
        }
        for (int i = 0; i < 8; i++) hash[i] += s[i];
    }
    Word key = 0;
    for (int i = 0; i < 8; i++) key |= (Word)(hash[i / 4] >> (24 - 8 * (i % 4)) & 255) << (8 * i);
    return key;
}

vector<uint32_t> order(Word seed, Word epoch, size_t count) {
    vector<Word> words = draw(seed, ORDER, 0, epoch, count);
    vector<uint32_t> places(count);
    for (size_t i = 0; i < count; i++) places[i] = (uint32_t)i;
    std::stable_sort(places.begin(), places.end(), [&](uint32_t a, uint32_t b) { return words[a] < words[b]; });
    return places;
}

// What a training position draws: its sample, whether the sample's caption is dropped, and t.
struct Row {
    Word position, epoch, sample;
    bool drop;
    float t;
};
Row draw_row(Word seed, Word position, size_t count) {
    Word epoch = position / count, sample = order(seed, epoch, count)[position % count];
    vector<Word> words = draw(seed, SCALARS, sample, epoch, 4);
    return {position, epoch, sample, uniforms(words)[0] < DROP_RATE, time_of(words)};
}

void note_draws(Golden& golden) {
    auto input = [&](const string& name, const char* key) { return golden.input(name, key); };
    for (int i = 0; golden.has("draws.words." + to_string(i)); i++) {
        const string name = "draws.words." + to_string(i);
        Word seed = input(name, "seed"), stream = input(name, "stream");
        Word sample = input(name, "sample"), epoch = input(name, "epoch");
        vector<Word> words = draw(seed, stream, sample, epoch, golden.elements(name), input(name, "first"));
        golden.note(name, words);
        if (i != 1) continue;  // the words that uniforms and normals are made from
        golden.note("draws.uniform", uniforms(words));
        golden.note("draws.normal", normals(seed, stream, sample, epoch, words.size()));
    }
    golden.note("draws.name_key", vector<Word>{key_of(golden.inputs("draws.name_key")["name"].text)});
    for (string name : {"draws.order.0", "draws.order.1"})
        golden.note(name, order(input(name, "seed"), input(name, "epoch"), input(name, "count")));
    for (Word sample = 0; sample < golden.elements("draws.drop"); sample++) {
        vector<Word> words = draw(input("draws.drop", "seed"), SCALARS, sample, input("draws.drop", "epoch"), 4);
        golden.note("draws.drop", uniforms(words)[0] < DROP_RATE);
        golden.note("draws.t", time_of(words));
    }
    for (string name : {"draws.t.shift", "draws.t.logit_normal", "draws.t.logit_normal_shift"}) {
        const Json& of = golden.inputs(name);
        TimeDistribution distribution{of["timestep"].text == "logit_normal", of["mean"].number(),
                                      of["width"].number(), of["shift"].number()};
        for (Word sample = 0; sample < golden.elements(name); sample++) {
            vector<Word> words = draw(input(name, "seed"), SCALARS, sample, input(name, "epoch"), 4);
            golden.note(name, time_of(words, distribution));
        }
    }
    for (string name : {"draws.latent_eps", "draws.noise", "draws.val_latent_eps", "draws.val_noise"}) {
        Word epoch = input(name, name.find("val") == string::npos ? "epoch" : "evaluation");
        Word seed = input(name, "seed"), stream = input(name, "stream"), sample = input(name, "sample");
        golden.note(name, normals(seed, stream, sample, epoch, golden.elements(name)));
    }
}

// ==== Step 1: data (docs/formats.md) =============================================================================
struct Sample {
    map<string, Floats> part;  // t5, clip, mean, logvar
    int timestep = -1;         // -1: none, as in training
};

// The samples of one tar file. A sample's .json comes before its arrays.
void read_shard(const string& path, vector<Sample>& samples) {
    const string tar = read_file(path);
    for (size_t at = 0; at + 512 <= tar.size() && tar[at];) {
        const string name = string(&tar[at], 100).c_str(), member = name.substr(name.find('.') + 1);
        size_t size = std::strtoull(tar.substr(at + 124, 12).c_str(), nullptr, 8);
        require(size <= tar.size() - at - 512, path + " is cut off in " + name);
        const string content = tar.substr(at + 512, size);
        if (member == "json") {
            const Json timestep = parse_json(content)["timestep"];
            samples.push_back({{}, timestep.text == "null" ? -1 : (int)timestep.whole(7)});
        } else if (!samples.empty()) {
            samples.back().part[member.substr(0, member.find('.'))] = read_npy(content, path + ": " + name);
        }
        at += 512 + (size + 511) / 512 * 512;
    }
}
vector<Sample> read_shards(const string& folder) {
    vector<string> paths;
    for (auto& entry : std::filesystem::directory_iterator(folder))
        if (entry.path().extension() == ".tar") paths.push_back(entry.path().string());
    std::sort(paths.begin(), paths.end());
    vector<Sample> samples;
    for (auto& path : paths) read_shard(path, samples);
    require(!samples.empty(), "no samples in " + folder);
    return samples;
}

// The golden run: its folder, its config and its data set.
struct Run {
    Golden& golden;
    Config config;
    Word seed;
    size_t batch, channels, height, width, text, elements;
    vector<Sample> train, val;
    Sample empty;  // the encodings of an empty caption

    Run(Golden& to, const string& folder) : golden(to), config(folder + "/config.toml") {
        seed = config.whole("train.seed", 0x1p52), batch = config.whole("train.global_batch");
        channels = config.whole("model.latent_channels");
        height = config.whole("model.latent_height"), width = config.whole("model.latent_width");
        text = config.whole("model.text_tokens");
        elements = channels * height * width;
        require(height % 2 == 0 && width % 2 == 0, "latent_height and latent_width must be even");
        train = read_shards(folder + "/data/train");
        val = read_shards(folder + "/data/val");
        for (string part : {"t5", "clip"}) {
            const string path = folder + "/data/empty_encodings/" + part + "_empty.npy";
            empty.part[part] = read_npy(read_file(path), path);
        }
    }
};

// ==== Matrices that remember how to send gradients back ==========================================================
// Steps 2 to 8 compute with these. Each operation has its backward pass beside it, so step 4 has no section of
// formulas. The loss puts its gradient into the prediction; backward() then runs the tape from its end.

float bf16(float value) {  // the nearest value on the grid of bf16; of two nearest the even one
    uint32_t bits = get<uint32_t>((const char*)&value);
    return std::isnan(value) ? value : from_bits((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16);
}
void round_all(Floats& values) { std::transform(values.begin(), values.end(), values.begin(), bf16); }

struct MatrixData {
    size_t rows, cols;
    Floats values, grads;
    const float* row(size_t i) const { return &values[i * cols]; }
    float* grad(size_t i) { return &grads[i * cols]; }
};
using Matrix = std::shared_ptr<MatrixData>;  // a copy shares the data
bool half_mode = false;                      // compute in bf16
vector<std::function<void()>> tape;          // one entry per operation, run from the last to the first

Matrix matrix(size_t rows, size_t cols, const Floats& values = {}) {
    require(rows * cols > 0 && rows * cols <= MAX_COUNT, "a matrix is empty or too large");
    require(values.empty() || values.size() == rows * cols, "a matrix does not have the size of its values");
    Matrix made = std::make_shared<MatrixData>(MatrixData{rows, cols, values, Floats(rows * cols)});
    made->values.resize(rows * cols);
    return made;
}

// Ends an operation. back(y) adds to the gradients of its operands. In bf16 results and their gradients are rounded.
template <class Back> Matrix result(Matrix y, Back back) {
    const bool rounded = half_mode;  // the mode of the forward pass, which may change before the backward pass
    if (rounded) round_all(y->values);
    tape.push_back([=] {
        if (rounded) round_all(y->grads);
        back(*y);
    });
    return y;
}
void backward() {
    for (; !tape.empty(); tape.pop_back()) tape.back()();
}

float dot(const float* a, const float* b, size_t count) {
    double sum = 0;
    for (size_t i = 0; i < count; i++) sum += (double)a[i] * b[i];
    return (float)sum;
}
void add_scaled(float* to, float factor, const float* from, size_t count) {
    for (size_t i = 0; i < count; i++) to[i] += factor * from[i];
}
void add_all(Floats& to, const Floats& from) {
    require(to.size() == from.size(), "two values that are added do not have the same size");
    add_scaled(to.data(), 1, from.data(), from.size());
}
double norm(const Floats& values) {
    double sum = 0;
    for (float value : values) sum += (double)value * value;
    return std::sqrt(sum);
}

// Values of a forward pass are noted under tag + name, if a golden folder is set.
Golden* noted = nullptr;
string tag;

Matrix note(const string& name, Matrix x) {
    if (noted) noted->note(tag + name, x->values);
    return x;
}

// ==== Step 2: latents and objective (docs/arithmetic.md) =========================================================
const float LATENT_SCALE = 0.3611f, LATENT_SHIFT = 0.1159f;

Matrix pack(const Run& run, const Floats& x) {  // (C, Y, X) to tokens row by row, with features (C, dy, dx)
    Matrix y = matrix(run.height / 2 * (run.width / 2), 4 * run.channels);
    for (size_t i = 0; i < run.elements; i++) {
        size_t channel = i / (run.height * run.width), row = i / run.width % run.height, col = i % run.width;
        size_t token = row / 2 * (run.width / 2) + col / 2, feature = 4 * channel + 2 * (row % 2) + col % 2;
        y->values[token * y->cols + feature] = x[i];
    }
    return y;
}

// Returns what the network is fed, and what it should predict.
pair<Matrix, Matrix> objective(const Run& run, const Sample& sample, const Floats& eps, const Floats& noise, float t) {
    Matrix latent = matrix(1, run.elements), x_t = matrix(1, run.elements), velocity = matrix(1, run.elements);
    const Floats &mean = sample.part.at("mean"), &logvar = sample.part.at("logvar");
    require(mean.size() == run.elements && logvar.size() == run.elements, "a latent's sizes do not fit");
    for (size_t i = 0; i < run.elements; i++) {
        float deviation = std::exp(logvar[i] / 2);
        latent->values[i] = LATENT_SCALE * (mean[i] + deviation * eps[i] - LATENT_SHIFT);
        x_t->values[i] = (1 - t) * latent->values[i] + t * noise[i];
        velocity->values[i] = noise[i] - latent->values[i];
    }
    note("latent", latent);
    note("x_t", x_t);
    Matrix target = note("target", pack(run, velocity->values));
    return {note("img", pack(run, x_t->values)), target};
}

// ==== Steps 3 and 4: operations and their gradients (docs/arithmetic.md) =========================================
// A parameter as operations see it: a copy in bf16 if the pass is in bf16. Its gradient stays fp32.
Matrix cast(Matrix parameter) {
    if (!half_mode) return parameter;
    return result(matrix(parameter->rows, parameter->cols, parameter->values),
                  [=](MatrixData& y) { add_all(parameter->grads, y.grads); });
}

Matrix linear(Matrix x, Matrix weight, Matrix bias) {
    require(x->cols == weight->cols && bias->values.size() == weight->rows, "a linear layer's sizes do not fit");
    weight = cast(weight), bias = cast(bias);
    Matrix y = matrix(x->rows, weight->rows);
    for (size_t o = 0; o < y->cols; o++)
        for (size_t i = 0; i < y->rows; i++)
            y->values[i * y->cols + o] = dot(x->row(i), weight->row(o), x->cols) + bias->values[o];
    return result(y, [=](MatrixData& to) {
        for (size_t o = 0; o < to.cols; o++)
            for (size_t i = 0; i < to.rows; i++) {
                float grad = to.grad(i)[o];
                bias->grads[o] += grad;
                add_scaled(x->grad(i), grad, weight->row(o), x->cols);
                add_scaled(weight->grad(o), grad, x->row(i), x->cols);
            }
    });
}

// An operation on each element. value_and_slope gives the result and its derivative.
template <class Function> Matrix each(Matrix x, Function value_and_slope) {
    Matrix y = matrix(x->rows, x->cols);
    for (size_t i = 0; i < x->values.size(); i++) y->values[i] = (float)value_and_slope(x->values[i]).first;
    return result(y, [=](MatrixData& to) {
        for (size_t i = 0; i < x->values.size(); i++)
            x->grads[i] += to.grads[i] * (float)value_and_slope(x->values[i]).second;
    });
}
Matrix silu(Matrix x) {
    return each(x, [](double a) {
        double sigmoid = 1 / (1 + std::exp(-a));
        return pair(a * sigmoid, sigmoid * (1 + a * (1 - sigmoid)));
    });
}
Matrix gelu(Matrix x) {  // the form with tanh
    return each(x, [](double a) {
        const double c = std::sqrt(2 / PI), cubic = 0.044715;
        double h = std::tanh(c * (a + cubic * a * a * a));
        double slope = 0.5 * (1 + h) + 0.5 * a * (1 - h * h) * c * (1 + 3 * cubic * a * a);
        return pair(0.5 * a * (1 + h), slope);
    });
}
Matrix add(Matrix a, Matrix b) {
    Matrix y = matrix(a->rows, a->cols, a->values);
    add_all(y->values, b->values);
    return result(y, [=](MatrixData& to) {
        add_all(a->grads, to.grads);
        add_all(b->grads, to.grads);
    });
}

// All that cuts and joins matrices copies pieces: a block of x, and where it goes.
struct Piece {
    Matrix x;
    size_t from_row, from_col, rows, cols, to_row = 0, to_col = 0;
};
Matrix joined(size_t rows, size_t cols, vector<Piece> pieces) {
    Matrix y = matrix(rows, cols);
    for (auto& p : pieces) {
        bool inside = p.from_row + p.rows <= p.x->rows && p.from_col + p.cols <= p.x->cols;
        require(inside && p.to_row + p.rows <= rows && p.to_col + p.cols <= cols, "two matrices do not fit together");
        for (size_t i = 0; i < p.rows; i++) {
            const float* from = p.x->row(p.from_row + i) + p.from_col;
            std::copy_n(from, p.cols, &y->values[(p.to_row + i) * cols + p.to_col]);
        }
    }
    return result(y, [=](MatrixData& to) {
        for (auto& p : pieces)
            for (size_t i = 0; i < p.rows; i++)
                add_scaled(p.x->grad(p.from_row + i) + p.from_col, 1, to.grad(p.to_row + i) + p.to_col, p.cols);
    });
}
Matrix columns(Matrix x, size_t from, size_t count) { return joined(x->rows, count, {{x, 0, from, x->rows, count}}); }
Matrix rows(Matrix x, size_t from, size_t count) { return joined(count, x->cols, {{x, from, 0, count, x->cols}}); }
Matrix above(Matrix a, Matrix b) {
    return joined(a->rows + b->rows, a->cols, {{a, 0, 0, a->rows, a->cols}, {b, 0, 0, b->rows, b->cols, a->rows, 0}});
}
Matrix beside(Matrix a, Matrix b) {
    return joined(a->rows, a->cols + b->cols, {{a, 0, 0, a->rows, a->cols}, {b, 0, 0, b->rows, b->cols, 0, a->cols}});
}

// (1 + scale) * layer_norm(x) + shift. Part n of the modulation mod is its columns n * d to n * d + d - 1. The scale
// is the part after the shift.
Matrix modulate(Matrix x, Matrix mod, size_t shift_part) {
    size_t d = x->cols, shift = shift_part * d, scale = shift + d;
    require(mod->values.size() >= scale + d, "a modulation is too short");
    Matrix y = matrix(x->rows, d), normed = matrix(x->rows, d);
    vector<double> inverse;
    for (size_t i = 0; i < x->rows; i++) {
        const float* in = x->row(i);
        double mean = 0, variance = 0;
        for (size_t j = 0; j < d; j++) mean += in[j] / (double)d;
        for (size_t j = 0; j < d; j++) variance += (in[j] - mean) * (in[j] - mean) / (double)d;
        inverse.push_back(1 / std::sqrt(variance + 1e-6));
        for (size_t j = 0; j < d; j++) {
            float value = (float)((in[j] - mean) * inverse[i]);
            if (half_mode) value = bf16(value);
            normed->values[i * d + j] = value;
            y->values[i * d + j] = (1 + mod->values[scale + j]) * value + mod->values[shift + j];
        }
    }
    return result(y, [=](MatrixData& to) {
        for (size_t i = 0; i < to.rows; i++) {
            const float *n = normed->row(i), *up = to.grad(i), *factor = &mod->values[scale];
            double mean = 0, along = 0;  // of the gradient of normed: its mean, and its part along normed
            for (size_t j = 0; j < d; j++) {
                double grad = up[j] * (1.0 + factor[j]);
                mod->grads[shift + j] += up[j];
                mod->grads[scale + j] += up[j] * n[j];
                mean += grad / (double)d;
                along += grad * n[j] / (double)d;
            }
            for (size_t j = 0; j < d; j++) {
                double grad = up[j] * (1.0 + factor[j]);
                x->grad(i)[j] += (float)((grad - mean - n[j] * along) * inverse[i]);
            }
        }
    });
}
Matrix gated(Matrix x, Matrix mod, size_t gate_part, Matrix y) {  // x + gate * y
    size_t d = x->cols, gate = gate_part * d;
    require(y->values.size() == x->values.size() && mod->values.size() >= gate + d, "a gate's sizes do not fit");
    Matrix z = matrix(x->rows, d);
    for (size_t i = 0; i < z->values.size(); i++)
        z->values[i] = x->values[i] + mod->values[gate + i % d] * y->values[i];
    return result(z, [=](MatrixData& to) {
        for (size_t i = 0; i < to.values.size(); i++) {
            x->grads[i] += to.grads[i];
            y->grads[i] += to.grads[i] * mod->values[gate + i % d];
            mod->grads[gate + i % d] += to.grads[i] * y->values[i];
        }
    });
}

// Cosine and sine of each token and each pair of a head's features. The table is computed in fp64.
using Rope = vector<array<float, 2>>;
Rope rope_table(const vector<double>& axes, size_t text, size_t height, size_t width) {
    bool sound = axes.size() == 3 && *std::min_element(axes.begin(), axes.end()) >= 2;
    sound = sound && *std::max_element(axes.begin(), axes.end()) <= 256;
    require(sound && text + height * width <= 65536, "RoPE: not three axes from 2 to 256, or too many tokens");
    Rope table;
    for (size_t token = 0; token < text + height * width; token++) {
        size_t patch = token < text ? 0 : token - text;
        double position[3] = {0, (double)(patch / width), (double)(patch % width)};
        for (size_t axis = 0; axis < 3; axis++)
            for (size_t i = 0; i < (size_t)axes[axis] / 2; i++) {
                double angle = position[axis] * std::pow(10000.0, -2.0 * (double)i / axes[axis]);
                table.push_back({(float)std::cos(angle), (float)std::sin(angle)});
            }
    }
    return table;
}
float rms_norm(const float* x, const float* scale, size_t count, float* y) {  // returns 1 / the root mean square
    double square = 0;
    for (size_t j = 0; j < count; j++) square += (double)x[j] * x[j] / (double)count;
    float inverse = (float)(1 / std::sqrt(square + 1e-6));
    for (size_t j = 0; j < count; j++) y[j] = x[j] * inverse * scale[j];
    return inverse;
}
void turn(float* x, const array<float, 2>* table, size_t count, float direction) {  // direction -1 turns back
    for (size_t p = 0; p < count / 2; p++) {
        float a = x[2 * p], b = x[2 * p + 1], c = table[p][0], s = direction * table[p][1];
        x[2 * p] = c * a - s * b;
        x[2 * p + 1] = s * a + c * b;
    }
}

// RMS norm of each head, then RoPE from the table's row first_token on. bf16 rounds only the end of both. normed
// receives what RoPE is fed.
Matrix norm_and_turn(Matrix x, Matrix parameter, const Rope& table, size_t first_token, Matrix normed) {
    size_t k = parameter->values.size(), heads = x->cols / k;
    require(k % 2 == 0 && x->cols % k == 0, "a head's size must be even and divide the features");
    require((first_token + x->rows) * (k / 2) <= table.size(), "rope_axes or the token count do not fit");
    Matrix scale = cast(parameter), y = matrix(x->rows, x->cols);
    const auto* start = &table[first_token * (k / 2)];
    Floats inverse;
    for (size_t at = 0; at < y->values.size(); at += k)
        inverse.push_back(rms_norm(&x->values[at], &scale->values[0], k, &y->values[at]));
    normed->values = y->values;
    for (size_t i = 0; i < inverse.size(); i++) turn(&y->values[i * k], start + i / heads * (k / 2), k, 1);
    return result(y, [=](MatrixData& to) {
        for (size_t i = 0; i < inverse.size(); i++) {
            Floats grad(&to.grads[i * k], &to.grads[i * k] + k);
            turn(grad.data(), start + i / heads * (k / 2), k, -1);
            const float* in = &x->values[i * k];
            double r = inverse[i], along = 0;
            for (size_t j = 0; j < k; j++) {
                scale->grads[j] += (float)(grad[j] * in[j] * r);
                grad[j] *= scale->values[j];
                along += (double)grad[j] * in[j] / (double)k;
            }
            for (size_t j = 0; j < k; j++) x->grads[i * k + j] += (float)(r * (grad[j] - in[j] * r * r * along));
        }
    });
}

Matrix attention(Matrix q, Matrix k, Matrix v, size_t heads) {  // softmax(q k^T / sqrt(K)) v
    size_t n = q->rows, m = k->rows, width = q->cols / heads;
    require(q->cols % heads == 0 && k->cols == q->cols && v->cols == q->cols && v->rows == m, "attention does not fit");
    const float factor = (float)(1 / std::sqrt((double)width));
    Matrix y = matrix(n, q->cols), softmax = matrix(heads * n, m);
    for (size_t head = 0; head < heads; head++)
        for (size_t i = 0; i < n; i++) {
            const size_t at = head * width;  // the head's first column
            float* p = &softmax->values[(head * n + i) * m];
            for (size_t j = 0; j < m; j++) p[j] = dot(q->row(i) + at, k->row(j) + at, width) * factor;
            const float largest = *std::max_element(p, p + m);
            double sum = 0;
            for (size_t j = 0; j < m; j++) sum += p[j] = std::exp(p[j] - largest);
            for (size_t j = 0; j < m; j++) {
                p[j] = (float)(p[j] / sum);
                add_scaled(&y->values[i * y->cols + at], p[j], v->row(j) + at, width);
            }
        }
    return result(y, [=](MatrixData& to) {
        Floats grad(m);  // of one row of the softmax
        for (size_t head = 0; head < heads; head++)
            for (size_t i = 0; i < n; i++) {
                const size_t at = head * width;
                const float *p = softmax->row(head * n + i), *up = to.grad(i) + at;
                double mean = 0;
                for (size_t j = 0; j < m; j++) {
                    grad[j] = dot(up, v->row(j) + at, width);
                    mean += (double)p[j] * grad[j];
                    add_scaled(v->grad(j) + at, p[j], up, width);
                }
                for (size_t j = 0; j < m; j++) {
                    float score = (float)(p[j] * (grad[j] - mean)) * factor;
                    add_scaled(q->grad(i) + at, score, k->row(j) + at, width);
                    add_scaled(k->grad(j) + at, score, q->row(i) + at, width);
                }
            }
    });
}

// ==== Step 3: the network ========================================================================================
struct Net {
    map<string, Matrix> parameters;
    vector<string> names;
    size_t heads = 0;
    Rope rope;

    Matrix at(const string& name) const {
        require(parameters.count(name), "index.json lacks the parameter " + name);
        return parameters.at(name);
    }
    void note_heads(const string& name, Matrix x) const {  // as (H, S, K)
        size_t k = x->cols / heads;
        for (size_t from = 0; noted && from < x->cols; from += k)
            for (size_t i = 0; i < x->rows; i++) {
                const float* head = x->row(i) + from;
                noted->note(tag + name, Floats(head, head + k));
            }
    }
    Matrix apply(const string& name, Matrix x) const {
        return note(name, linear(x, at(name + ".weight"), at(name + ".bias")));
    }
    Matrix embed(const string& name, Matrix x) const {
        return note(name, apply(name + ".out_layer", silu(apply(name + ".in_layer", x))));
    }

    using Heads = array<Matrix, 3>;  // queries, keys, values
    Heads qkv(const string& norm, Matrix x, size_t first_token) const {
        size_t d = x->cols / 3;
        Matrix q = columns(x, 0, d), k = columns(x, d, d), normed = matrix(x->rows, d);
        if (norm == "double_blocks.0.img_attn.norm") note_heads("rms_norm.input", q);
        q = norm_and_turn(q, at(norm + ".query_norm.scale"), rope, first_token, normed);
        note_heads(norm + ".query_norm", normed);
        k = norm_and_turn(k, at(norm + ".key_norm.scale"), rope, first_token, normed);
        note_heads(norm + ".key_norm", normed);
        return {q, k, columns(x, 2 * d, d)};
    }
    Matrix attend(const string& block, const Heads& h) const {
        for (size_t i = 0; i < 3; i++) note_heads(block + "attention." + "qkv"[i], h[i]);
        return note(block + "attention", attention(h[0], h[1], h[2], heads));
    }

    // block is a name with its dot: "double_blocks.0."
    void double_block(const string& block, Matrix& img, Matrix& txt, Matrix conditioning) const {
        Matrix *streams[2] = {&txt, &img}, mod[2];  // text first
        const string name[2] = {block + "txt", block + "img"};
        const size_t first_token[2] = {0, txt->rows};
        Heads part[2], both;
        for (int s = 0; s < 2; s++) {
            mod[s] = apply(name[s] + "_mod.lin", conditioning);
            Matrix x = note(name[s] + "_attn.qkv.input", modulate(*streams[s], mod[s], 0));
            part[s] = qkv(name[s] + "_attn.norm", apply(name[s] + "_attn.qkv", x), first_token[s]);
        }
        for (size_t i = 0; i < 3; i++) both[i] = above(part[0][i], part[1][i]);
        Matrix joint = attend(block, both);
        for (int s = 0; s < 2; s++) {
            Matrix& x = *streams[s];
            x = gated(x, mod[s], 2, apply(name[s] + "_attn.proj", rows(joint, first_token[s], x->rows)));
            Matrix y = note(name[s] + "_mlp.0.input", modulate(x, mod[s], 3));
            y = note(name[s] + "_mlp.1", gelu(apply(name[s] + "_mlp.0", y)));
            x = note(name[s], gated(x, mod[s], 5, apply(name[s] + "_mlp.2", y)));
        }
    }
    void single_block(const string& block, Matrix& x, Matrix conditioning) const {
        Matrix mod = apply(block + "modulation.lin", conditioning);
        Matrix y = note(block + "linear1.input", modulate(x, mod, 0));
        y = apply(block + "linear1", y);
        const size_t qkv_width = 3 * x->cols;
        Matrix attended = attend(block, qkv(block + "norm", columns(y, 0, qkv_width), 0));
        require(y->cols > qkv_width, "linear1 is too narrow");
        y = beside(attended, gelu(columns(y, qkv_width, y->cols - qkv_width)));
        y = apply(block + "linear2", note(block + "linear2.input", y));
        x = note(block.substr(0, block.size() - 1), gated(x, mod, 2, y));
    }

    Matrix forward(Matrix img, Matrix txt, Matrix clip, float t) const {
        Matrix waves = matrix(1, 256);
        for (int i = 0; i < 128; i++) {
            double angle = 1000.0 * t * std::pow(10000.0, -i / 128.0);
            waves->values[i] = (float)std::cos(angle);
            waves->values[128 + i] = (float)std::sin(angle);
        }
        note("time_waves", waves);
        if (half_mode) {  // encodings are on the grid of bf16 already
            round_all(waves->values);
            round_all(img->values);
        }
        img = apply("img_in", img);
        txt = apply("txt_in", txt);
        Matrix time = embed("time_in", waves), vec = note("vec", add(time, embed("vector_in", clip)));
        Matrix conditioning = silu(vec);
        for (int b = 0; parameters.count("double_blocks." + to_string(b) + ".img_mod.lin.bias"); b++)
            double_block("double_blocks." + to_string(b) + ".", img, txt, conditioning);
        Matrix x = above(txt, img);
        for (int b = 0; parameters.count("single_blocks." + to_string(b) + ".linear1.bias"); b++)
            single_block("single_blocks." + to_string(b) + ".", x, conditioning);
        Matrix mod = apply("final_layer.adaLN_modulation.1", conditioning);
        x = note("final_layer.linear.input", modulate(rows(x, txt->rows, img->rows), mod, 0));
        return note("prediction", apply("final_layer.linear", x));
    }
};

Net given_net(const Run& run) {  // with the weights that the golden run starts from
    Net net;
    net.heads = run.config.whole("model.heads");
    net.rope = rope_table(run.config.list("model.rope_axes"), run.text, run.height / 2, run.width / 2);
    net.names = run.golden.parameters;
    for (auto& name : net.names) {
        const Floats& values = run.golden.read("weights." + name);
        vector<size_t> shape = run.golden.shape("weights." + name);
        size_t columns = shape.empty() ? 1 : shape.back();
        net.parameters[name] = matrix(values.size() / columns, columns, values);
    }
    return net;
}

Floats initial(Word seed, const string& name, const vector<size_t>& shape) {  // a parameter that starts from the seed
    auto has = [&](const char* part) { return name.find(part) != string::npos; };
    size_t count = 1, sizes = 0;
    for (size_t size : shape) count *= size, sizes += size;
    if (has(".scale")) return Floats(count, 1);
    if (has(".bias") || has("_mod.") || has("modulation") || has("final_layer")) return Floats(count, 0);
    if (has("time_in") || has("vector_in")) {
        Floats values = normals(seed, INIT, key_of(name), 0, count);
        for (float& value : values) value *= 0.02f;
        return values;
    }
    const float width = (float)std::sqrt(6.0 / (double)sizes);
    Floats values = uniforms(draw(seed, INIT, key_of(name), 0, count));
    for (float& value : values) value = (2 * value - 1) * width;
    return values;
}
void note_initial(Run& run) {
    Golden& golden = run.golden;
    for (auto& name : golden.parameters) {
        Floats values = initial(run.seed, name, golden.shape("weights." + name));
        golden.note("init.norms", norm(values));
        const string sharded = "ranks.init." + name;
        if (golden.has(sharded)) {  // the first rows of rank 1's shard; two ranks
            size_t first = (golden.shape("weights." + name, 2)[0] + 1) / 2 * golden.shape(sharded, 2)[1];
            require(first + golden.elements(sharded) <= values.size(), sharded + " has too many rows");
            golden.note(sharded, Floats(&values[first], &values[first] + golden.elements(sharded)));
        }
        if (!golden.has("init." + name)) continue;
        values.resize(golden.elements("init." + name));  // the first rows
        golden.note("init." + name, values);
    }
}

// ==== Step 4: losses and gradients ===============================================================================
// The mean square of the error. share times its gradient becomes the gradient of the prediction.
float mean_square(Matrix prediction, Matrix target, double share) {
    const size_t count = target->values.size();
    require(prediction->values.size() == count, "the prediction does not have the target's size");
    double mean = 0;
    for (size_t i = 0; i < count; i++) {
        double error = prediction->values[i] - target->values[i];
        mean += error * error / (double)count;
        prediction->grads[i] = (float)(share * 2 * error / (double)count);
    }
    return (float)mean;
}

// The loss of one sample. share times its gradient is added to the net's.
// stream is the stream of eps; noise has the next one.
float sample_loss(const Run& run, const Net& net, const Sample& sample, const Sample& caption, float t, Word stream,
                  Word index, Word epoch, double share) {
    Floats eps = normals(run.seed, stream, index, epoch, run.elements);
    Floats noise = normals(run.seed, stream + 1, index, epoch, run.elements);
    note("batch.latent_eps", matrix(1, run.elements, eps));
    note("batch.noise", matrix(1, run.elements, noise));
    auto [img, target] = objective(run, sample, eps, noise, t);
    const Floats &t5 = caption.part.at("t5"), &clip = caption.part.at("clip");
    Matrix txt = matrix(run.text, t5.size() / run.text, t5);
    float loss = mean_square(net.forward(img, txt, matrix(1, clip.size(), clip), t), target, share);
    backward();
    return loss;
}

// The mean loss of count positions from first on, and its gradient. Notes rows and losses under a prefix.
double batch_loss(const Run& run, const Net& net, Word first, size_t count, const string& prefix) {
    auto note = [&](const string& name, auto value) {
        run.golden.note(prefix + name, value);
        if (prefix == "step1.") run.golden.note(name, value);  // some values of the first step have no prefix
    };
    double mean = 0;
    for (size_t i = 0; i < count; i++) {
        Row row = draw_row(run.seed, first + i, run.train.size());
        note("position", (double)row.position);
        note("epoch", (double)row.epoch);
        note("sample", (double)row.sample);
        note("drop", row.drop);
        note("t", row.t);
        const Sample &sample = run.train[row.sample], &caption = row.drop ? run.empty : sample;
        for (string part : {"t5", "clip"}) note("batch." + part, caption.part.at(part));
        for (string part : {"mean", "logvar"}) note("batch." + part, sample.part.at(part));
        note("batch.t", row.t);
        const double share = 1.0 / (double)count;
        float value = sample_loss(run, net, sample, caption, row.t, LATENT, row.sample, row.epoch, share);
        note("losses", value);
        mean += value * share;
    }
    note("loss", mean);
    return mean;
}
double note_gradients(Golden& golden, const Net& net, const string& prefix) {  // returns the norm of all
    Floats norms;
    for (auto& name : net.names) {
        golden.note(prefix + name, net.at(name)->grads);
        norms.push_back((float)norm(net.at(name)->grads));
    }
    golden.note(prefix + "norms", norms);
    return norm(norms);
}

// ==== Step 5: schedule, clipping and AdamW =======================================================================
float learning_rate(double peak, double number, double warmup_steps) {  // number counts from 1
    return (float)(peak * std::min(1.0, number / warmup_steps));
}
float clip_coefficient(float norm, float clip_norm) { return std::min(1.0f, clip_norm / (norm + 1e-6f)); }
void note_schedule(Golden& golden) {
    const Json& rates = golden.inputs("schedule.lr");
    const double peak = rates["peak"].number(), warmup_steps = rates["warmup_steps"].number();
    for (auto& step : rates["steps"].items)  // they count from 0
        golden.note("schedule.lr", learning_rate(peak, step.number() + 1, warmup_steps));
    for (float norm : golden.read("clip.norms")) golden.note("clip.coefficient", clip_coefficient(norm, 1));
}

const double BETA_1 = 0.9, BETA_2 = 0.95, EPSILON = 1e-8, WEIGHT_DECAY = 0.1;
struct AdamW {
    map<string, Floats> exp_avg, exp_avg_sq;
    int steps = 0;

    void step(Net& net, float rate, float coefficient) {  // clears the gradients
        steps++;
        const double correction_1 = 1 - std::pow(BETA_1, steps), correction_2 = 1 - std::pow(BETA_2, steps);
        for (auto& name : net.names) {
            Floats &weights = net.at(name)->values, &grads = net.at(name)->grads;
            Floats &mean = exp_avg[name], &square = exp_avg_sq[name];
            mean.resize(weights.size());
            square.resize(weights.size());
            for (size_t i = 0; i < weights.size(); i++) {
                double gradient = grads[i] * coefficient;
                mean[i] = (float)(BETA_1 * mean[i] + (1 - BETA_1) * gradient);
                square[i] = (float)(BETA_2 * square[i] + (1 - BETA_2) * gradient * gradient);
                double update = mean[i] / correction_1 / (std::sqrt(square[i] / correction_2) + EPSILON);
                weights[i] = (float)(weights[i] * (1 - WEIGHT_DECAY * rate) - rate * update);
                grads[i] = 0;
            }
        }
    }
};

void note_steps(Run& run) {
    Golden& golden = run.golden;
    Net net = given_net(run);
    for (auto& angle : net.rope) golden.note("rope", angle);
    const float clip_norm = (float)run.config.number("optim.clip_norm");
    const double peak = run.config.number("optim.lr"), warmup_steps = run.config.number("optim.warmup_steps");
    AdamW adam;
    for (size_t number = 1; golden.has("step" + to_string(number) + ".loss"); number++) {
        const string step = "step" + to_string(number) + ".";
        noted = number == 1 ? &golden : nullptr;
        batch_loss(run, net, (number - 1) * run.batch, run.batch, step);
        float before = (float)note_gradients(golden, net, number == 1 ? "grad." : step);
        float rate = learning_rate(peak, (double)number, warmup_steps);
        golden.note(step + "grad_norm", before);
        golden.note(step + "clip_coefficient", clip_coefficient(before, clip_norm));
        golden.note(step + "lr", rate);
        adam.step(net, rate, clip_coefficient(before, clip_norm));
        for (auto& name : net.names) {
            Floats change = net.at(name)->values;
            golden.note(step + "weights." + name, change);
            add_scaled(change.data(), -1, golden.read("weights." + name).data(), change.size());
            golden.note(step + "update_norms", norm(change));
            golden.note(step + "exp_avg." + name, adam.exp_avg[name]);
            golden.note(step + "exp_avg.norms", norm(adam.exp_avg[name]));
            golden.note(step + "exp_avg_sq." + name, adam.exp_avg_sq[name]);
            golden.note(step + "exp_avg_sq.norms", norm(adam.exp_avg_sq[name]));
        }
    }
}

// ==== Step 6: validation =========================================================================================
void note_validation(Run& run) {
    Net net = given_net(run);
    auto note = [&](const string& name, double value) { run.golden.note("val." + name, value); };
    double sums[8] = {}, counts[8] = {}, mean = 0;
    for (size_t i = 0; i < run.val.size(); i++) {
        const int k = run.val[i].timestep;
        require(k >= 0, "a validation sample has no timestep");
        const float t = (float)k / 8;
        float loss = sample_loss(run, net, run.val[i], run.val[i], t, VAL_LATENT, i, 0, 0);
        run.golden.note("val.latent_eps", normals(run.seed, VAL_LATENT, i, 0, run.elements));
        run.golden.note("val.noise", normals(run.seed, VAL_NOISE, i, 0, run.elements));
        note("t", t);
        note("losses", loss);
        sums[k] += loss;
        counts[k]++;
    }
    for (int k = 0; k < 8; k++) {
        note("count", counts[k]);
        note("loss_per_timestep", sums[k] / counts[k]);
        mean += sums[k] / counts[k] / 8;
    }
    note("loss", mean);
}

// ==== Step 7: precision ==========================================================================================
void note_bf16(Run& run) {
    Golden& golden = run.golden;
    Net net = given_net(run);
    noted = &golden, tag = "bf16.";
    for (auto& angle : net.rope) golden.note("bf16.rope", angle);
    half_mode = true;
    batch_loss(run, net, 0, run.batch, "bf16.");
    note_gradients(golden, net, "bf16.grad.");
    noted = nullptr;
    auto fed = [&](const string& name) {  // the operand of an operation; a batch of one sample has four dimensions
        vector<size_t> shape = golden.shape("bf16.fed." + name);
        const Floats& values = golden.read("bf16.fed." + name);
        size_t rows = shape.size() == 4 ? shape[1] : shape.size() <= 1 ? 1 : shape[0];
        return matrix(rows, values.size() / rows, values);
    };
    auto only = [&](const string& name, Matrix y) { golden.note("bf16.only." + name, y->values); };
    only("linear", linear(fed("linear.x"), fed("linear.weight"), fed("linear.bias")));
    only("modulate", modulate(fed("modulate.x"), beside(fed("modulate.shift"), fed("modulate.scale")), 0));
    const size_t heads = golden.shape("bf16.fed.attention.q", 4)[2];
    only("attention", attention(fed("attention.q"), fed("attention.k"), fed("attention.v"), heads));
    only("gelu", gelu(fed("gelu.x")));
    only("gate", gated(fed("gate.x"), fed("gate.gate"), 0, fed("gate.y")));
    const Floats& input = golden.read("bf16.rms_norm.input");
    Matrix every_head = matrix(1, input.size(), input), normed = matrix(1, input.size());
    net.rope.assign(input.size(), {1, 0});  // no turn: only the norm is noted
    norm_and_turn(every_head, net.at("double_blocks.0.img_attn.norm.query_norm.scale"), net.rope, 0, normed);
    golden.note("bf16.rms_norm", normed->values);

    half_mode = false;  // the other results are fp32
    const Json &place = golden.inputs("bf16.only.rope"), &grid = place["grid"];
    require(grid.items.size() == 2, "bf16.only.rope: bad grid");
    vector<double> axes;
    for (auto& axis : place["axes"].items) axes.push_back((double)axis.whole(256));
    const size_t text = place["text_tokens"].whole(4096);
    const Rope table = rope_table(axes, text, grid.items[0].whole(4096), grid.items[1].whole(4096));
    only("rope", norm_and_turn(fed("rope.x"), fed("rope.norm"), table, 0, normed));
    Matrix prediction = fed("loss.prediction"), target = fed("loss.target");
    for (size_t i = 0; i < target->rows; i++)
        golden.note("bf16.only.losses", mean_square(rows(prediction, i, 1), rows(target, i, 1), 0));
    tape.clear();  // the single operations have no backward pass
}

// ==== Step 8: ranks ==============================================================================================
void note_ranks(Run& run) {
    Golden& golden = run.golden;
    const vector<Json>& positions = golden.inputs("ranks.position")["positions"].items;  // rank 0's, then rank 1's
    require(positions.size() == 4 && golden.input("ranks.position", "ranks") == 2, "ranks.position: not two of two");
    const Word first = positions[0].whole();
    const size_t rows_of_rank = 2;
    vector<Net> nets = {given_net(run), given_net(run)};
    double mean = 0;
    for (size_t rank = 0; rank < 2; rank++) {
        mean += batch_loss(run, nets[rank], first + rank * rows_of_rank, rows_of_rank, "ranks.") / 2;
        golden.note("ranks.grad_norm_of_rank", note_gradients(golden, nets[rank], "of_rank."));
    }
    for (auto& name : nets[0].names) {
        Floats& grads = nets[0].at(name)->grads;
        add_all(grads, nets[1].at(name)->grads);
        for (float& value : grads) value /= 2;
    }
    golden.note("ranks.mean_loss", mean);
    golden.note("ranks.grad_norm", note_gradients(golden, nets[0], "ranks.grad."));
}

int main(int count, char** arguments) try {
    require(count == 3, "usage: cpp_port GOLDEN_FOLDER OUT.safetensors");
    const string folder = arguments[1];
    Golden golden(folder);
    Run run(golden, folder);
    note_draws(golden);
    note_initial(run);
    note_schedule(golden);
    note_steps(run);
    note_validation(run);
    note_bf16(run);
    note_ranks(run);
    golden.write(arguments[2]);
} catch (const std::exception& error) {
    fail(string("a file of the golden folder is damaged or incomplete: ") + error.what());
}
