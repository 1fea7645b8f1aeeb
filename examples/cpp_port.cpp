// A port of flux_ref's training arithmetic to C++17 and its standard library. It was written from PORTING.md and the
// pages beside it. It reads the golden folder, computes the golden values, and writes them to a safetensors file:
// g++ -O2 -std=c++17 port.cpp -o port && ./port tests/golden dump.safetensors
// Order of this file: files, draws, number formats, tape, network, run, then one function per step of PORTING's table.
// Networks compute one sample at a time, so every value is a matrix of rows (tokens) and columns (features). Batches of
// golden values are samples one after the other. The machine must store the least significant byte first.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

using std::array, std::map, std::pair, std::size_t, std::string, std::to_string, std::vector;
using Floats = vector<float>;
using Word = uint64_t;

[[noreturn]] void fail(const string& message) {
    std::cerr << "port: " << message << "\n";
    std::exit(2);
}

// ---- Files (docs/formats.md) ------------------------------------------------------------------------------------
string read_file(const string& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file || std::filesystem::is_directory(path)) fail("cannot read " + path);
    return string(std::istreambuf_iterator<char>(file), {});
}
template <class T> T get(const char* bytes) {
    T value;
    std::memcpy(&value, bytes, sizeof value);
    return value;
}
template <class T> void put(string& bytes, T value) { bytes.append((const char*)&value, sizeof value); }
float from_bits(uint32_t bits) { return get<float>((const char*)&bits); }

// Numbers, strings, true, false and null are kept as text, so that 64-bit integers lose no bits.
struct Json {
    string text;
    vector<string> keys;  // of an object
    vector<Json> items;   // of an object or a list
    const Json* find(const string& key) const {
        size_t i = std::find(keys.begin(), keys.end(), key) - keys.begin();
        return i < keys.size() ? &items[i] : nullptr;
    }
    const Json& operator[](const string& key) const {
        if (!find(key)) fail("JSON without the field " + key);
        return *find(key);
    }
    double number() const { return std::strtod(text.c_str(), nullptr); }
    Word word() const { return std::strtoull(text.c_str(), nullptr, 10); }
};

Json parse_json(const char*& s) {  // of a text that ends with zero; commas and colons are read as blanks
    auto skip = [&] { while (*s && std::strchr(" \t\r\n,:", *s)) s++; };
    Json json;
    skip();
    if (*s == '{' || *s == '[') {
        bool object = *s++ == '{';
        for (skip(); *s && *s != '}' && *s != ']'; skip()) {
            if (object) json.keys.push_back(parse_json(s).text);
            json.items.push_back(parse_json(s));
        }
        if (!*s++) fail("JSON ends too early");
    } else if (*s == '"') {
        for (s++; *s && *s != '"'; s++) json.text += *s == '\\' && s[1] ? *++s : *s;
        if (!*s++) fail("JSON ends too early");
    } else {
        while (*s && !std::strchr(",]} \t\r\n", *s)) json.text += *s++;
    }
    return json;
}
Json parse_json(const string& text) {
    const char* s = text.c_str();
    return parse_json(s);
}

using Config = map<string, vector<double>>;
Config read_config(const string& path) {  // the lines section.key = number, or a list of numbers
    Config config;
    std::istringstream lines(read_file(path));
    for (string line, key, equals; std::getline(lines, line);) {
        for (char& c : line = line.substr(0, line.find('#')))
            if (std::strchr("[],", c)) c = ' ';
        std::istringstream words(line);
        if (words >> key >> equals)
            for (double number; words >> number;) config[key].push_back(number);
    }
    return config;
}

Floats read_npy(const string& bytes, const string& what) {
    if (bytes.size() < 10 || bytes.compare(0, 6, "\x93NUMPY") != 0) fail(what + " is not a .npy file");
    size_t start = 10 + get<uint16_t>(&bytes[8]), count = 1;
    string header = bytes.substr(10, start - 10), shape = header.substr(header.find('(') + 1);
    std::replace(shape.begin(), shape.end(), ',', ' ');
    std::istringstream sizes(shape.substr(0, shape.find(')')));
    for (size_t size; sizes >> size;) count *= size;
    bool fp32 = header.find("'<f4'") != string::npos, bf16 = header.find("'<u2'") != string::npos;
    if (fp32 == bf16 || bytes.size() < start + (fp32 ? 4 : 2) * count) fail(what + " is cut off, or not <f4 or <u2");
    Floats values(count);
    for (size_t i = 0; i < count; i++)
        values[i] = fp32 ? get<float>(&bytes[start + 4 * i]) : from_bits(get<uint16_t>(&bytes[start + 2 * i]) << 16);
    return values;
}

struct Sample {
    map<string, Floats> part;  // t5, clip, mean, logvar
    int timestep = -1;  // none
};
vector<Sample> read_shards(const string& folder) {
    vector<string> paths;
    std::error_code none;
    for (auto& entry : std::filesystem::directory_iterator(folder, none))
        if (entry.path().extension() == ".tar") paths.push_back(entry.path().string());
    if (paths.empty()) fail("no shards in " + folder);
    std::sort(paths.begin(), paths.end());
    vector<Sample> samples;
    for (auto& path : paths) {
        string tar = read_file(path);
        for (size_t at = 0; at + 512 <= tar.size() && tar[at];) {
            string name = tar.c_str() + at, member = name.substr(name.find('.') + 1);
            size_t size = std::strtoull(tar.substr(at + 124, 12).c_str(), nullptr, 8);
            string content = tar.substr(at + 512, size);
            if (member == "json") {
                string timestep = parse_json(content)["timestep"].text;
                samples.push_back({{}, timestep == "null" ? -1 : std::atoi(timestep.c_str())});
            } else if (!samples.empty()) {
                samples.back().part[member.substr(0, member.find('.'))] = read_npy(content, path + ": " + name);
            }
            at += 512 + (size + 511) / 512 * 512;
        }
    }
    return samples;
}

// The golden folder, and the values that this port computes. A value's shape and dtype come from index.json.
struct Golden {
    Json index;
    vector<string> parameters;
    map<string, const Json*> entries;
    map<string, Floats> given;
    map<string, string> computed;  // the bytes of a value, in its dtype
    explicit Golden(const string& folder) : index(parse_json(read_file(folder + "/index.json"))) {
        for (auto& name : index["parameters"].items) parameters.push_back(name.text);
        for (auto& entry : index["values"].items) entries[entry["name"].text] = &entry;
        string file = read_file(folder + "/golden.safetensors");
        size_t start = file.size() < 8 ? 0 : 8 + get<Word>(&file[0]);
        Json header = parse_json(start < 8 || start > file.size() ? "" : file.substr(8, start - 8));
        for (auto& [name, entry] : entries) {
            bool fed = name == "bf16.rms_norm.input";  // computed, but also fed to bf16.rms_norm
            if ((*entry)["given"].text != "true" && !fed) continue;
            const Json& place = header[name];
            string dtype = place["dtype"].text;
            const vector<Json>& offsets = place["data_offsets"].items;
            if (start + offsets[1].word() > file.size()) fail("golden.safetensors is cut off");
            for (size_t at = start + offsets[0].word(); at < start + offsets[1].word(); at += dtype == "I64" ? 8 : 4)
                given[name].push_back(dtype == "I64" ? (float)get<int64_t>(&file[at]) : get<float>(&file[at]));
        }
    }
    const Json& entry(const string& name) const { return *entries.at(name); }
    const Json& inputs(const string& name) const { return entry(name)["inputs"]; }
    const Floats& read(const string& name) const { return given.at(name); }
    vector<size_t> shape(const string& name) const {
        vector<size_t> sizes;
        for (auto& size : entry(name)["shape"].items) sizes.push_back(size.word());
        return sizes;
    }
    // Appends to a computed value, so a batch may be noted sample by sample. Other names are ignored.
    template <class V> auto note(const string& name, const V& values) -> decltype(values.begin(), void()) {
        if (!entries.count(name)) return;
        string &bytes = computed[name], dtype = entry(name)["dtype"].text;
        for (auto value : values) {
            if (dtype == "fp32" || dtype == "bf16") put(bytes, (float)value);
            else if (dtype == "int64") put(bytes, (int64_t)value);
            else if (dtype == "uint64") put(bytes, (Word)value);
            else put(bytes, (uint8_t)value);
        }
    }
    void note(const string& name, double value) { note(name, array<double, 1>{value}); }
    void write(const string& path) const {
        static const map<string, pair<string, size_t>> dtypes = {
            {"fp32", {"F32", 4}}, {"bf16", {"F32", 4}}, {"int64", {"I64", 8}},
            {"bool", {"BOOL", 1}}, {"uint8", {"U8", 1}}, {"uint64", {"U64", 8}}};
        string header = "{", data, length;
        for (auto& [name, bytes] : computed) {
            auto [dtype, count] = dtypes.at(entry(name)["dtype"].text);  // bytes of one element, then of all
            string sizes;
            for (size_t size : shape(name)) count *= size, sizes += (sizes.empty() ? "" : ",") + to_string(size);
            if (bytes.size() != count) fail(name + " does not have the shape of index.json");
            header += '"' + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":[" + sizes + "],\"data_offsets\":["
                      + to_string(data.size()) + "," + to_string(data.size() + count) + "]},";
            data += bytes;
        }
        header.back() = '}';
        header.resize((header.size() + 7) / 8 * 8, ' ');
        put(length, (Word)header.size());
        std::ofstream file(path, std::ios::binary);
        file << length << header << data;
        if (!file.flush()) fail("cannot write " + path);
    }
};

// ---- Draws (docs/draws.md) --------------------------------------------------------------------------------------
enum Stream { ORDER, SCALARS, LATENT, NOISE, VAL_LATENT, VAL_NOISE, INIT };
const double PI = 3.14159265358979323846;
pair<Word, Word> multiply(Word a, Word b) {  // high and low 64 bits
    Word a0 = (uint32_t)a, a1 = a >> 32, b0 = (uint32_t)b, b1 = b >> 32;
    Word middle = a1 * b0 + (a0 * b0 >> 32), other = a0 * b1 + (uint32_t)middle;
    return {a1 * b1 + (middle >> 32) + (other >> 32), a * b};
}
array<Word, 4> philox(Word k0, Word k1, array<Word, 4> c) {
    for (int round = 0; round < 10; round++) {
        auto [high0, low0] = multiply(0xD2E7470EE14C6C93, c[0]);
        auto [high1, low1] = multiply(0xCA5A826395121157, c[2]);
        c = {high1 ^ c[1] ^ k0, low1, high0 ^ c[3] ^ k1, low0};
        k0 += 0x9E3779B97F4A7C15;
        k1 += 0xBB67AE8584CAA73B;
    }
    return c;
}

// Words first .. first + count - 1 of a stream.
vector<Word> draw(Word seed, Word stream, Word sample, Word epoch, size_t count, Word first = 0) {
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
Floats normals(Word seed, Word stream, Word sample, Word epoch, size_t count) {
    vector<Word> words = draw(seed, stream, sample, epoch, count + count % 2);
    Floats values;
    for (size_t i = 0; i < count; i += 2) {
        double a = (double)(words[i] >> 11), b = (double)(words[i + 1] >> 11);
        double radius = std::sqrt(-2 * std::log((a + 1) * 0x1p-53)), angle = 2 * PI * b * 0x1p-53;
        values.push_back((float)(radius * std::cos(angle)));
        if (i + 1 < count) values.push_back((float)(radius * std::sin(angle)));
    }
    return values;
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
    uint32_t h[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    auto turn = [](uint32_t x, int n) { return x >> n | x << (32 - n); };
    string text = name + '\x80';
    while (text.size() % 64 != 56) text += '\0';
    for (int i = 7; i >= 0; i--) text += char((Word)name.size() * 8 >> (8 * i));
    for (size_t block = 0; block < text.size(); block += 64) {
        uint32_t w[64] = {}, s[8];
        for (int i = 0; i < 64; i++) w[i / 4] = w[i / 4] << 8 | (unsigned char)text[block + i];
        for (int i = 16; i < 64; i++)
            w[i] = w[i - 16] + (turn(w[i - 15], 7) ^ turn(w[i - 15], 18) ^ w[i - 15] >> 3) + w[i - 7]
                   + (turn(w[i - 2], 17) ^ turn(w[i - 2], 19) ^ w[i - 2] >> 10);
        std::copy(h, h + 8, s);
        for (int i = 0; i < 64; i++) {
            uint32_t t1 = s[7] + (turn(s[4], 6) ^ turn(s[4], 11) ^ turn(s[4], 25)) + ((s[4] & s[5]) ^ (~s[4] & s[6]))
                          + constants[i] + w[i];
            uint32_t t2 = (turn(s[0], 2) ^ turn(s[0], 13) ^ turn(s[0], 22))
                          + ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
            for (int j = 7; j > 0; j--) s[j] = s[j - 1];
            s[4] += t1;
            s[0] = t1 + t2;
        }
        for (int i = 0; i < 8; i++) h[i] += s[i];
    }
    Word key = 0;
    for (int i = 0; i < 8; i++) key |= (Word)(h[i / 4] >> (24 - 8 * (i % 4)) & 255) << (8 * i);
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
Row draw_row(Word seed, Word position, size_t count, double rate) {
    static map<array<Word, 3>, vector<uint32_t>> orders;
    Word epoch = position / count;
    vector<uint32_t>& places = orders[{seed, epoch, count}];
    if (places.empty()) places = order(seed, epoch, count);
    Word sample = places[position % count];
    Floats u = uniforms(draw(seed, SCALARS, sample, epoch, 2));
    return {position, epoch, sample, u[0] < rate, u[1]};
}

// ---- Number formats (docs/arithmetic.md) -------------------------------------------------------------------------
float bf16(float value) {
    uint32_t bits = get<uint32_t>((const char*)&value);
    return std::isnan(value) ? value : from_bits((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16);
}
void round_all(Floats& values) { std::transform(values.begin(), values.end(), values.begin(), bf16); }

struct Fp8 {
    string name;
    int mantissa, bias;
    float largest;
    bool fnuz() const { return bias == 8 || bias == 16; }
    float decode(int byte) const {
        int code = byte & 127, exponent = code >> mantissa, fraction = code & ((1 << mantissa) - 1);
        double size = exponent ? std::ldexp((1 << mantissa) + fraction, exponent - bias - mantissa)
                               : std::ldexp(fraction, 1 - bias - mantissa);
        if (size > largest) size = name == "e5m2" && fraction == 0 ? INFINITY : NAN;
        if (fnuz() && byte == 0x80) size = NAN;
        return (float)(byte >> 7 ? -size : size);
    }
    int encode(float value) const {  // clamped, then the nearest byte; of two nearest the even one
        if (std::isnan(value)) return fnuz() ? 0x80 : 0x7F;
        double size = std::min(std::fabs(value), largest);
        int best = 0;
        for (int code = 1; code < 128 && decode(code) <= largest; code++) {
            double nearer = std::fabs(decode(code) - size) - std::fabs(decode(best) - size);
            if (nearer < 0 || (nearer == 0 && code % 2 == 0)) best = code;
        }
        return std::signbit(value) && !(fnuz() && best == 0) ? best | 0x80 : best;
    }
    float scale(float amax, int margin = 0) const { return std::min(largest / amax / (float)(1 << margin), 0x1p44f); }
};
const Fp8 E4M3{"e4m3fn", 3, 7, 448}, E5M2{"e5m2", 2, 15, 57344};
const Fp8 E4M3FNUZ{"e4m3fnuz", 3, 8, 240}, E5M2FNUZ{"e5m2fnuz", 2, 16, 57344};
float amax(const Floats& values) {
    float largest = 0;
    for (float value : values) largest = std::max(largest, std::fabs(value));
    return largest;
}

// ---- Tape: matrices that remember how to send gradients back -----------------------------------------------------
// A matrix of the full model may repeat a short list of numbers (period > 0). Then it keeps no gradient, only its norm.
struct Matrix {
    size_t rows, cols;
    Floats v, g;
    size_t period = 0;
    double grad_square = 0;
    const float* row(size_t i) const { return &v[period ? i * cols % period : i * cols]; }
    float* grad(size_t i) { return &g[i * cols]; }
};
using M = std::shared_ptr<Matrix>;
bool half_mode = false;                     // compute in bf16
bool taping = true;                         // remember the way back
vector<std::function<void()>> tape;         // one entry per operation, run from the last to the first

M matrix(size_t rows, size_t cols, const Floats& values = {}) {
    M m = std::make_shared<Matrix>(Matrix{rows, cols, values, Floats(rows * cols)});
    m->v.resize(rows * cols);
    return m;
}

// Ends an operation. back(y) adds to the gradients of its operands. In bf16 results and their gradients are rounded.
template <class Back> M result(M y, Back back) {
    if (half_mode) round_all(y->v);
    if (taping && half_mode) tape.push_back([=] { round_all(y->g), back(*y); });
    if (taping && !half_mode) tape.push_back([=] { back(*y); });
    return y;
}
void backward() { for (; !tape.empty(); tape.pop_back()) tape.back()(); }

float dot(const float* a, const float* b, size_t n) {  // sixteen partial sums in fp32, then fp64
    float part[16] = {};
    size_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (size_t j = 0; j < 16; j++) part[j] += a[i + j] * b[i + j];
    double sum = 0;
    for (float p : part) sum += p;
    for (; i < n; i++) sum += (double)a[i] * b[i];
    return (float)sum;
}
void add_scaled(float* to, float factor, const float* from, size_t n) {
    for (size_t i = 0; i < n; i++) to[i] += factor * from[i];
}
void add_all(Floats& to, const Floats& from) { add_scaled(to.data(), 1, from.data(), from.size()); }
// A parameter as operations see it: a copy in bf16 if the pass is in bf16. Its gradient stays fp32.
M cast(M p) {
    return half_mode ? result(matrix(p->rows, p->cols, p->v), [=](Matrix& y) { add_all(p->g, y.g); }) : p;
}

M linear(M x, M weight, M bias) {
    weight = cast(weight), bias = cast(bias);
    M y = matrix(x->rows, weight->rows);
    for (size_t o = 0; o < y->cols; o++)
        for (size_t i = 0; i < y->rows; i++)
            y->v[i * y->cols + o] = dot(x->row(i), weight->row(o), x->cols) + bias->v[o];
    return result(y, [=](Matrix& to) {
        for (size_t o = 0; o < to.cols; o++)
            for (size_t i = 0; i < to.rows; i++) {
                float g = to.grad(i)[o];
                bias->g[o] += g;
                add_scaled(x->grad(i), g, weight->row(o), x->cols);
                if (!weight->period) add_scaled(weight->grad(o), g, x->row(i), x->cols);
            }
        for (size_t i = 0; weight->period && i < to.rows; i++)  // |sum_i g_i x_i^T|^2 = sum_ij (g_i g_j) (x_i x_j)
            for (size_t j = 0; j < to.rows; j++)
                weight->grad_square +=
                    (double)dot(to.grad(i), to.grad(j), to.cols) * dot(x->row(i), x->row(j), x->cols);
    });
}
template <class F> M each(M x, F value_and_slope) {  // an operation on each element
    M y = matrix(x->rows, x->cols);
    for (size_t i = 0; i < x->v.size(); i++) y->v[i] = (float)value_and_slope(x->v[i]).first;
    return result(y, [=](Matrix& to) {
        for (size_t i = 0; i < x->v.size(); i++) x->g[i] += to.g[i] * (float)value_and_slope(x->v[i]).second;
    });
}
M silu(M x) {
    return each(x, [](double a) {
        double s = 1 / (1 + std::exp(-a));
        return pair(a * s, s * (1 + a * (1 - s)));
    });
}
M gelu(M x) {
    return each(x, [](double a) {
        const double c = std::sqrt(2 / PI), h = std::tanh(c * (a + 0.044715 * a * a * a));
        return pair(0.5 * a * (1 + h), 0.5 * (1 + h) + 0.5 * a * (1 - h * h) * c * (1 + 3 * 0.044715 * a * a));
    });
}
M add(M a, M b) {
    M y = matrix(a->rows, a->cols, a->v);
    add_all(y->v, b->v);
    return result(y, [=](Matrix& to) { add_all(a->g, to.g), add_all(b->g, to.g); });
}
struct Piece {  // a block of x, and where it goes
    M x;
    size_t from_row, from_col, rows, cols, to_row = 0, to_col = 0;
};
M joined(size_t rows, size_t cols, vector<Piece> pieces) {
    M y = matrix(rows, cols);
    for (auto& p : pieces)
        for (size_t i = 0; i < p.rows; i++)
            std::copy_n(p.x->row(p.from_row + i) + p.from_col, p.cols, &y->v[(p.to_row + i) * cols + p.to_col]);
    return result(y, [=](Matrix& to) {
        for (auto& p : pieces)
            for (size_t i = 0; i < p.rows; i++)
                add_scaled(p.x->grad(p.from_row + i) + p.from_col, 1, to.grad(p.to_row + i) + p.to_col, p.cols);
    });
}
M columns(M x, size_t from, size_t count) { return joined(x->rows, count, {{x, 0, from, x->rows, count}}); }
M rows(M x, size_t from, size_t count) { return joined(count, x->cols, {{x, from, 0, count, x->cols}}); }
M pair_of(M a, M b, size_t row, size_t col) {  // b at (row, col) of the result, a at (0, 0)
    return joined(row + b->rows, col + b->cols, {{a, 0, 0, a->rows, a->cols}, {b, 0, 0, b->rows, b->cols, row, col}});
}
M above(M a, M b) { return pair_of(a, b, a->rows, 0); }
M beside(M a, M b) { return pair_of(a, b, 0, a->cols); }

// (1 + scale) * layer_norm(x) + shift. Part n of the modulation mod is its columns n * d to n * d + d - 1.
M modulate(M x, M mod, size_t shift_part) {
    size_t d = x->cols, shift = shift_part * d, scale = shift + d;
    M y = matrix(x->rows, d), norm = matrix(x->rows, d);
    vector<double> inverse;
    for (size_t i = 0; i < x->rows; i++) {
        double mean = 0, variance = 0;
        for (size_t j = 0; j < d; j++) mean += x->row(i)[j] / (double)d;
        for (size_t j = 0; j < d; j++) variance += (x->row(i)[j] - mean) * (x->row(i)[j] - mean) / (double)d;
        inverse.push_back(1 / std::sqrt(variance + 1e-6));
        for (size_t j = 0; j < d; j++) {
            float n = (float)((x->row(i)[j] - mean) * inverse[i]);
            norm->v[i * d + j] = n = half_mode ? bf16(n) : n;
            y->v[i * d + j] = (1 + mod->v[scale + j]) * n + mod->v[shift + j];
        }
    }
    return result(y, [=](Matrix& to) {
        for (size_t i = 0; i < to.rows; i++) {
            const float *n = norm->row(i), *up = to.grad(i), *factor = &mod->v[scale];
            double mean = 0, along = 0;
            for (size_t j = 0; j < d; j++) {
                mod->g[shift + j] += up[j];
                mod->g[scale + j] += up[j] * n[j];
                mean += up[j] * (1.0 + factor[j]) / (double)d;
                along += up[j] * (1.0 + factor[j]) * n[j] / (double)d;
            }
            for (size_t j = 0; j < d; j++)
                x->grad(i)[j] += (float)((up[j] * (1.0 + factor[j]) - mean - n[j] * along) * inverse[i]);
        }
    });
}
M gated(M x, M mod, size_t gate_part, M y) {  // x + gate * y
    size_t d = x->cols, gate = gate_part * d;
    M z = matrix(x->rows, d);
    for (size_t i = 0; i < z->v.size(); i++) z->v[i] = x->v[i] + mod->v[gate + i % d] * y->v[i];
    return result(z, [=](Matrix& to) {
        for (size_t i = 0; i < to.v.size(); i++) {
            x->g[i] += to.g[i];
            y->g[i] += to.g[i] * mod->v[gate + i % d];
            mod->g[gate + i % d] += to.g[i] * y->v[i];
        }
    });
}

// ---- The network (docs/arithmetic.md) ----------------------------------------------------------------------------
using Rope = vector<array<float, 2>>;  // tokens x pairs of a head: cosine, sine
Rope rope_table(const vector<double>& axes, size_t text, size_t height, size_t width) {
    Rope table;
    for (size_t token = 0; token < text + height * width; token++) {
        size_t patch = token < text ? 0 : token - text;
        double position[3] = {0, (double)(patch / width), (double)(patch % width)};
        for (int axis = 0; axis < 3; axis++)
            for (int i = 0; i < axes[axis] / 2; i++) {
                double angle = position[axis] * std::pow(10000.0, -2 * i / axes[axis]);
                table.push_back({(float)std::cos(angle), (float)std::sin(angle)});
            }
    }
    return table;
}
float rms_norm(const float* x, const float* scale, size_t k, float* y) {
    double square = 0;
    for (size_t j = 0; j < k; j++) square += (double)x[j] * x[j] / (double)k;
    float inverse = (float)(1 / std::sqrt(square + 1e-6));
    for (size_t j = 0; j < k; j++) y[j] = x[j] * inverse * scale[j];
    return inverse;
}
void turn(float* x, const array<float, 2>* table, size_t k, float direction) {  // direction -1 turns back
    for (size_t p = 0; p < k / 2; p++) {
        float a = x[2 * p], b = x[2 * p + 1], c = table[p][0], s = direction * table[p][1];
        x[2 * p] = c * a - s * b;
        x[2 * p + 1] = s * a + c * b;
    }
}

// RMS norm of each head, then RoPE from the table's row first_token on; rounded once. normed receives what RoPE is fed.
M norm_and_turn(M x, M parameter, const Rope& table, size_t first_token, M normed) {
    M scale = cast(parameter), y = matrix(x->rows, x->cols);
    size_t k = scale->cols, heads = x->cols / k;
    const auto* start = &table[first_token * (k / 2)];
    Floats inverse;
    for (size_t at = 0; at < y->v.size(); at += k) inverse.push_back(rms_norm(&x->v[at], &scale->v[0], k, &y->v[at]));
    normed->v = y->v;
    for (size_t i = 0; i < inverse.size(); i++) turn(&y->v[i * k], start + i / heads * (k / 2), k, 1);
    return result(y, [=](Matrix& to) {
        for (size_t i = 0; i < inverse.size(); i++) {
            Floats g(&to.g[i * k], &to.g[i * k] + k);
            turn(g.data(), start + i / heads * (k / 2), k, -1);
            double r = inverse[i], along = 0;
            const float* a = &x->v[i * k];
            for (size_t j = 0; j < k; j++) {
                scale->g[j] += (float)(g[j] * a[j] * r);
                g[j] *= scale->v[j];
                along += (double)g[j] * a[j] / (double)k;
            }
            for (size_t j = 0; j < k; j++) x->g[i * k + j] += (float)(r * (g[j] - a[j] * r * r * along));
        }
    });
}

M attention(M q, M k, M v, size_t heads) {  // softmax(q k^T / sqrt(K)) v
    size_t n = q->rows, m = k->rows, width = q->cols / heads;
    float root = (float)(1 / std::sqrt((double)width));
    M y = matrix(n, q->cols), softmax = matrix(heads * n, m);
    for (size_t h = 0; h < heads * width; h += width)
        for (size_t i = 0; i < n; i++) {
            float* p = &softmax->v[(h / width * n + i) * m];
            double sum = 0;
            for (size_t j = 0; j < m; j++) p[j] = dot(q->row(i) + h, k->row(j) + h, width) * root;
            float largest = *std::max_element(p, p + m);
            for (size_t j = 0; j < m; j++) sum += p[j] = std::exp(p[j] - largest);
            for (size_t j = 0; j < m; j++) {
                p[j] = (float)(p[j] / sum);
                add_scaled(&y->v[i * y->cols + h], p[j], v->row(j) + h, width);
            }
        }
    return result(y, [=](Matrix& to) {
        Floats g(m);
        for (size_t h = 0; h < heads * width; h += width)
            for (size_t i = 0; i < n; i++) {
                const float *p = softmax->row(h / width * n + i), *up = to.grad(i) + h;
                double mean = 0;
                for (size_t j = 0; j < m; j++) {
                    mean += (double)p[j] * (g[j] = dot(up, v->row(j) + h, width));
                    add_scaled(v->grad(j) + h, p[j], up, width);
                }
                for (size_t j = 0; j < m; j++) {
                    float score = (float)(p[j] * (g[j] - mean)) * root;
                    add_scaled(q->grad(i) + h, score, k->row(j) + h, width);
                    add_scaled(k->grad(j) + h, score, q->row(i) + h, width);
                }
            }
    });
}

struct Net {
    map<string, M> parameters;
    vector<string> names;
    size_t heads = 0;
    Rope rope;
    Golden* golden = nullptr;  // if set, a forward pass notes its values there under tag + name
    string tag;
    M at(const string& name) const { return parameters.at(name); }
    M note(const string& name, M x) const {
        if (golden) golden->note(tag + name, x->v);
        return x;
    }
    void note_heads(const string& name, M x) const {  // as (H, S, K)
        size_t k = x->cols / heads;
        for (size_t h = 0; golden && h < x->cols; h += k)
            for (size_t i = 0; i < x->rows; i++) golden->note(tag + name, Floats(x->row(i) + h, x->row(i) + h + k));
    }
    M apply(const string& name, M x) const { return note(name, linear(x, at(name + ".weight"), at(name + ".bias"))); }
    M embed(const string& name, M x) const {
        return note(name, apply(name + ".out_layer", silu(apply(name + ".in_layer", x))));
    }
    using Heads = array<M, 3>;  // queries, keys, values
    Heads qkv(const string& norm, M x, size_t first_token) const {
        size_t d = x->cols / 3;
        M q = columns(x, 0, d), k = columns(x, d, d), normed = matrix(x->rows, d);
        if (norm == "double_blocks.0.img_attn.norm") note_heads("rms_norm.input", q);
        q = norm_and_turn(q, at(norm + ".query_norm.scale"), rope, first_token, normed);
        note_heads(norm + ".query_norm", normed);
        k = norm_and_turn(k, at(norm + ".key_norm.scale"), rope, first_token, normed);
        note_heads(norm + ".key_norm", normed);
        return {q, k, columns(x, 2 * d, d)};
    }
    M attend(const string& block, const Heads& h) const {
        for (int i = 0; i < 3; i++) note_heads(block + "attention." + "qkv"[i], h[i]);
        return note(block + "attention", attention(h[0], h[1], h[2], heads));
    }
    // block is a name with its dot: "double_blocks.0."
    void double_block(const string& block, M& img, M& txt, M conditioning) const {
        M *streams[2] = {&txt, &img}, mod[2];  // text first
        string name[2] = {block + "txt", block + "img"};
        Heads part[2], both;
        size_t text = txt->rows;
        for (int s = 0; s < 2; s++) {
            mod[s] = apply(name[s] + "_mod.lin", conditioning);
            M x = note(name[s] + "_attn.qkv.input", modulate(*streams[s], mod[s], 0));
            part[s] = qkv(name[s] + "_attn.norm", apply(name[s] + "_attn.qkv", x), s * text);
        }
        for (int i = 0; i < 3; i++) both[i] = above(part[0][i], part[1][i]);
        M joint = attend(block, both);
        for (int s = 0; s < 2; s++) {
            M& x = *streams[s];
            x = gated(x, mod[s], 2, apply(name[s] + "_attn.proj", rows(joint, s * text, x->rows)));
            M y = note(name[s] + "_mlp.0.input", modulate(x, mod[s], 3));
            y = note(name[s] + "_mlp.1", gelu(apply(name[s] + "_mlp.0", y)));
            x = note(name[s], gated(x, mod[s], 5, apply(name[s] + "_mlp.2", y)));
        }
    }
    void single_block(const string& block, M& x, M conditioning) const {
        M mod = apply(block + "modulation.lin", conditioning), y = note(block + "linear1.input", modulate(x, mod, 0));
        y = apply(block + "linear1", y);
        M attended = attend(block, qkv(block + "norm", columns(y, 0, 3 * x->cols), 0));
        y = beside(attended, gelu(columns(y, 3 * x->cols, y->cols - 3 * x->cols)));
        y = apply(block + "linear2", note(block + "linear2.input", y));
        x = note(block.substr(0, block.size() - 1), gated(x, mod, 2, y));
    }
    M forward(M img, M txt, M clip, float t) const {
        M waves = matrix(1, 256);
        for (int i = 0; i < 128; i++) {
            double angle = 1000.0 * t * std::pow(10000.0, -i / 128.0);
            waves->v[i] = (float)std::cos(angle);
            waves->v[128 + i] = (float)std::sin(angle);
        }
        note("time_waves", waves);
        if (half_mode) round_all(waves->v);
        img = apply("img_in", img);
        txt = apply("txt_in", txt);
        M time = embed("time_in", waves), vec = note("vec", add(time, embed("vector_in", clip)));
        M conditioning = silu(vec);
        string block;
        for (int b = 0; parameters.count((block = "double_blocks." + to_string(b) + ".") + "img_mod.lin.bias"); b++)
            double_block(block, img, txt, conditioning);
        M x = above(txt, img);
        for (int b = 0; parameters.count((block = "single_blocks." + to_string(b) + ".") + "linear1.bias"); b++)
            single_block(block, x, conditioning);
        M mod = apply("final_layer.adaLN_modulation.1", conditioning);
        x = note("final_layer.linear.input", modulate(rows(x, txt->rows, img->rows), mod, 0));
        return note("prediction", apply("final_layer.linear", x));
    }
};

// ---- The run: data, objective, optimizer -------------------------------------------------------------------------
struct Run {
    Golden& golden;
    const Config& config;
    Word seed;
    int batch;
    size_t channels, height, width, text, t5_dim, clip_dim, elements;
    vector<Sample> train, val;
    Sample empty;
    Run(Golden& to, const Config& c, const string& data) : golden(to), config(c) {
        auto size = [&](const char* key) { return (size_t)config.at(key)[0]; };
        seed = size("train.seed"), batch = (int)size("train.global_batch");
        channels = size("model.latent_channels"), height = size("model.latent_height");
        width = size("model.latent_width"), elements = channels * height * width;
        text = size("model.text_tokens"), t5_dim = size("model.t5_dim"), clip_dim = size("model.clip_dim");
        train = read_shards(data + "/train");
        val = read_shards(data + "/val");
        for (string part : {"t5", "clip"}) {
            string path = data + "/empty_encodings/" + part + "_empty.npy";
            empty.part[part] = read_npy(read_file(path), path);
        }
        for (auto* set : {&train, &val})
            for (Sample& s : *set)
                if (s.part["t5"].size() != text * t5_dim || s.part["clip"].size() != clip_dim
                    || s.part["mean"].size() != elements || s.part["logvar"].size() != elements)
                    fail("a sample of " + data + " has other sizes than config.toml");
    }
    Net given_net() const {
        Net net;
        net.heads = (size_t)config.at("model.heads")[0];
        net.rope = rope_table(config.at("model.rope_axes"), text, height / 2, width / 2);
        net.names = golden.parameters;
        for (auto& name : net.names) {
            const Floats& values = golden.read("weights." + name);
            size_t columns = golden.shape("weights." + name).back();
            net.parameters[name] = matrix(values.size() / columns, columns, values);
        }
        return net;
    }
    M pack(const Floats& x) const {  // (C, Y, X) to tokens row by row, features (C, dy, dx)
        M y = matrix(height / 2 * (width / 2), 4 * channels);
        for (size_t i = 0; i < elements; i++) {
            size_t c = i / (height * width), row = i / width % height, col = i % width;
            y->v[(row / 2 * (width / 2) + col / 2) * y->cols + 4 * c + 2 * (row % 2) + col % 2] = x[i];
        }
        return y;
    }
    // The loss of one sample. Its gradient, times share, is added to the net's. stream is that of eps; noise is next.
    float loss(const Net& net, const Sample& sample, const Sample& caption, float t, Word stream, Word index,
               Word epoch, double share) const {
        M eps = matrix(1, elements, normals(seed, stream, index, epoch, elements));
        M noise = matrix(1, elements, normals(seed, stream + 1, index, epoch, elements));
        net.note("batch.latent_eps", eps);
        net.note("batch.noise", noise);
        taping = share != 0;
        M latent = matrix(1, elements), x_t = matrix(1, elements), velocity = matrix(1, elements);
        for (size_t i = 0; i < elements; i++) {
            float deviation = std::exp(sample.part.at("logvar")[i] / 2);
            latent->v[i] = 0.3611f * (sample.part.at("mean")[i] + deviation * eps->v[i] - 0.1159f);
            x_t->v[i] = (1 - t) * latent->v[i] + t * noise->v[i];
            velocity->v[i] = noise->v[i] - latent->v[i];
        }
        net.note("latent", latent);
        net.note("x_t", x_t);
        M target = net.note("target", pack(velocity->v)), img = net.note("img", pack(x_t->v));
        if (half_mode) round_all(img->v);
        M prediction = net.forward(img, matrix(text, t5_dim, caption.part.at("t5")),
                                   matrix(1, clip_dim, caption.part.at("clip")), t);
        double mean = 0;
        for (size_t i = 0; i < elements; i++) {
            double error = prediction->v[i] - target->v[i];
            mean += error * error / (double)elements;
            prediction->g[i] = (float)(share * 2 * error / (double)elements);
        }
        backward();
        return (float)mean;
    }
    // The mean loss of count positions from first on, and its gradient. Notes rows and losses under a prefix.
    double batch_loss(const Net& net, Word first, int count, const string& prefix) const {
        auto note = [&](const string& name, auto value) {
            golden.note(prefix + name, value);
            if (prefix == "step1.") golden.note(name, value);  // some values of the first step have no prefix
        };
        double mean = 0;
        for (int i = 0; i < count; i++) {
            Row row = draw_row(seed, first + (Word)i, train.size(), 0.1);
            note("position", (double)row.position);
            note("epoch", (double)row.epoch);
            note("sample", (double)row.sample);
            note("drop", row.drop);
            note("t", row.t);
            const Sample &sample = train[row.sample], &caption = row.drop ? empty : sample;
            for (string part : {"t5", "clip"}) note("batch." + part, caption.part.at(part));
            for (string part : {"mean", "logvar"}) note("batch." + part, sample.part.at(part));
            note("batch.t", row.t);
            float value = loss(net, sample, caption, row.t, LATENT, row.sample, row.epoch, 1.0 / count);
            note("losses", value);
            mean += value / count;
        }
        note("loss", mean);
        return mean;
    }
};

double norm(const Floats& values) {
    double sum = 0;
    for (float value : values) sum += (double)value * value;
    return std::sqrt(sum);
}
double note_gradients(Golden& golden, const Net& net, const string& prefix) {  // returns the norm of all
    Floats norms;
    for (auto& name : net.names) {
        golden.note(prefix + name, net.at(name)->g);
        norms.push_back((float)norm(net.at(name)->g));
    }
    golden.note(prefix + "norms", norms);
    return norm(norms);
}
float learning_rate(double peak, double number, double warmup_steps) {  // number counts from 1
    return (float)(peak * std::min(1.0, number / warmup_steps));
}
float clip_coefficient(float norm, float clip_norm) { return std::min(1.0f, clip_norm / (norm + 1e-6f)); }

struct AdamW {
    map<string, Floats> m, v;
    int steps = 0;
    void step(Net& net, float rate, float coefficient) {  // clears the gradients
        double first = 1 - std::pow(0.9, ++steps), second = 1 - std::pow(0.95, steps);
        for (auto& name : net.names) {
            Floats &w = net.at(name)->v, &g = net.at(name)->g, &mean = m[name], &square = v[name];
            mean.resize(w.size()), square.resize(w.size());
            for (size_t i = 0; i < w.size(); i++) {
                double gradient = g[i] * coefficient;
                mean[i] = (float)(0.9 * mean[i] + 0.1 * gradient);
                square[i] = (float)(0.95 * square[i] + 0.05 * gradient * gradient);
                double update = mean[i] / first / (std::sqrt(square[i] / second) + 1e-8);
                w[i] = (float)(w[i] * (1 - 0.1 * rate) - rate * update);
                g[i] = 0;
            }
        }
    }
};

// ---- PORTING's steps 1 to 6 --------------------------------------------------------------------------------------
void note_draws(Golden& golden) {
    auto input = [&](const string& name, const char* key) { return golden.inputs(name)[key].word(); };
    for (int i = 0; golden.entries.count("draws.words." + to_string(i)); i++) {
        string name = "draws.words." + to_string(i);
        Word seed = input(name, "seed"), stream = input(name, "stream"), sample = input(name, "sample");
        vector<Word> words = draw(seed, stream, sample, input(name, "epoch"), 8, input(name, "first"));
        golden.note(name, words);
        if (i == 1) golden.note("draws.uniform", uniforms(words));
        if (i == 1) golden.note("draws.normal", normals(seed, stream, sample, input(name, "epoch"), 8));
    }
    golden.note("draws.name_key", vector<Word>{key_of(golden.inputs("draws.name_key")["name"].text)});
    for (string name : {"draws.order.0", "draws.order.1"})
        golden.note(name, order(input(name, "seed"), input(name, "epoch"), input(name, "count")));
    for (Word sample = 0; sample < input("draws.drop", "count"); sample++) {
        Floats u = uniforms(draw(input("draws.drop", "seed"), SCALARS, sample, input("draws.drop", "epoch"), 2));
        golden.note("draws.drop", u[0] < 0.1);
        golden.note("draws.t", u[1]);
    }
    for (string name : {"draws.latent_eps", "draws.noise", "draws.val_latent_eps", "draws.val_noise"}) {
        size_t count = 1;
        for (size_t size : golden.shape(name)) count *= size;
        golden.note(name, normals(input(name, "seed"), input(name, "stream"), input(name, "sample"), input(
            name, golden.inputs(name).find("epoch") ? "epoch" : "evaluation"), count));
    }
    for (float position : golden.read("full.positions")) {
        Row row = draw_row(input("full.sample", "seed"), (Word)position, input("full.sample", "count"), 0.1);
        golden.note("full.sample", (double)row.sample);
        golden.note("full.drop", row.drop);
        golden.note("full.t", row.t);
    }
    const Json& rates = golden.inputs("schedule.lr");
    for (auto& step : rates["steps"].items)
        golden.note("schedule.lr", learning_rate(rates["peak"].number(), step.number() + 1,
                                                 rates["warmup_steps"].number()));
    for (float norm : golden.read("clip.norms")) golden.note("clip.coefficient", clip_coefficient(norm, 1));
}
void note_data(Run& run) {
    vector<pair<string, vector<Sample>>> sets = {{"train.", run.train}, {"val.", run.val}, {"empty.", {run.empty}}};
    for (auto& [set, samples] : sets)
        for (auto& sample : samples) {
            for (auto& [part, values] : sample.part) run.golden.note("data." + set + part, values);
            run.golden.note("data." + set + "timestep", sample.timestep);
        }
}
Floats initial(Word seed, const string& name, const vector<size_t>& shape) {  // a parameter that starts from the seed
    auto has = [&](const char* part) { return name.find(part) != string::npos; };
    size_t count = shape.size() == 2 ? shape[0] * shape[1] : shape[0];
    if (has(".scale")) return Floats(count, 1);
    if (has(".bias") || has("_mod.") || has("modulation") || has("final_layer")) return Floats(count, 0);
    bool embedder = has("time_in") || has("vector_in");
    float width = embedder ? 0.02f : (float)std::sqrt(6.0 / (double)(shape[0] + shape[1]));
    Floats values = embedder ? normals(seed, INIT, key_of(name), 0, count)
                             : uniforms(draw(seed, INIT, key_of(name), 0, count));
    for (float& value : values) value = (embedder ? value : 2 * value - 1) * width;
    return values;
}
void note_initial(Run& run) {
    for (auto& name : run.golden.parameters) {
        vector<size_t> shape = run.golden.shape("weights." + name);
        Floats values = initial(run.seed, name, shape);
        run.golden.note("init.norms", norm(values));
        if (!run.golden.entries.count("init." + name)) continue;
        values.resize(run.golden.shape("init." + name)[0] * shape[1]);  // the first rows
        run.golden.note("init." + name, values);
    }
}

void note_steps(Run& run) {
    Golden& golden = run.golden;
    Net net = run.given_net();
    for (auto& turn : net.rope) golden.note("rope", turn);
    AdamW adam;
    for (int number = 1; golden.entries.count("step" + to_string(number) + ".loss"); number++) {
        string step = "step" + to_string(number) + ".";
        net.golden = number == 1 ? &golden : nullptr;
        run.batch_loss(net, (Word)(number - 1) * run.batch, run.batch, step);
        float before = (float)note_gradients(golden, net, number == 1 ? "grad." : step);
        float clip = (float)run.config.at("optim.clip_norm")[0];
        float rate = learning_rate(run.config.at("optim.lr")[0], number, run.config.at("optim.warmup_steps")[0]);
        golden.note(step + "grad_norm", before);
        golden.note(step + "clip_coefficient", clip_coefficient(before, clip));
        golden.note(step + "lr", rate);
        adam.step(net, rate, clip_coefficient(before, clip));
        for (auto& name : net.names) {
            Floats change = net.at(name)->v;
            golden.note(step + "weights." + name, change);
            add_scaled(change.data(), -1, golden.read("weights." + name).data(), change.size());
            golden.note(step + "update_norms", norm(change));
            golden.note(step + "exp_avg." + name, adam.m[name]);
            golden.note(step + "exp_avg.norms", norm(adam.m[name]));
            golden.note(step + "exp_avg_sq." + name, adam.v[name]);
            golden.note(step + "exp_avg_sq.norms", norm(adam.v[name]));
        }
    }
}
void note_validation(Run& run) {
    Net net = run.given_net();
    double sums[8] = {}, counts[8] = {}, mean = 0;
    for (size_t i = 0; i < run.val.size(); i++) {
        int k = run.val[i].timestep;
        if (k < 0 || k > 7) fail("a validation sample has no timestep");
        float loss = run.loss(net, run.val[i], run.val[i], (float)k / 8, VAL_LATENT, i, 0, 0);
        run.golden.note("val.t", k / 8.0);
        run.golden.note("val.losses", loss);
        sums[k] += loss, counts[k]++;
    }
    for (int k = 0; k < 8; k++) {
        run.golden.note("val.loss_per_timestep", sums[k] / counts[k]);
        mean += sums[k] / counts[k] / 8;
    }
    run.golden.note("val.loss", mean);
}

// ---- PORTING's steps 7 to 9: precision, ranks, full size, log ----------------------------------------------------
void note_bf16(Run& run) {
    Golden& golden = run.golden;
    Net net = run.given_net();
    net.golden = &golden, net.tag = "bf16.";
    for (auto& turn : net.rope) golden.note("bf16.rope", turn);
    half_mode = true;
    run.batch_loss(net, 0, run.batch, "bf16.");
    note_gradients(golden, net, "bf16.grad.");
    auto fed = [&](const string& name) {  // the operand of a single operation
        vector<size_t> shape = golden.shape("bf16.fed." + name);
        const Floats& values = golden.read("bf16.fed." + name);
        size_t rows = shape.size() == 4 ? shape[1] : shape.size() == 1 ? 1 : shape[0];
        return matrix(rows, values.size() / rows, values);
    };
    auto only = [&](const string& name, M y) { golden.note("bf16.only." + name, y->v); };
    taping = false;
    only("linear", linear(fed("linear.x"), fed("linear.weight"), fed("linear.bias")));
    only("modulate", modulate(fed("modulate.x"), beside(fed("modulate.shift"), fed("modulate.scale")), 0));
    only("attention", attention(fed("attention.q"), fed("attention.k"), fed("attention.v"),
                                golden.shape("bf16.fed.attention.q")[2]));
    only("gelu", gelu(fed("gelu.x")));
    only("gate", gated(fed("gate.x"), fed("gate.gate"), 0, fed("gate.y")));
    const Floats& input = golden.read("bf16.rms_norm.input");
    M heads = matrix(1, input.size(), input), normed = matrix(1, input.size());
    norm_and_turn(heads, net.at("double_blocks.0.img_attn.norm.query_norm.scale"), net.rope, 0, normed);
    golden.note("bf16.rms_norm", normed->v);
    half_mode = false;  // the other results are fp32
    M target = fed("loss.target");
    // The pages do not give these axes and positions: one text token, and a grid of 2 x 3.
    only("rope", norm_and_turn(fed("rope.x"), fed("rope.norm"), rope_table({4, 4, 8}, 1, 2, 3), 0, normed));
    for (size_t i = 0; i < target->rows; i++) {
        Floats error(target->row(i), target->row(i) + target->cols);
        add_scaled(error.data(), -1, fed("loss.prediction")->row(i), target->cols);
        golden.note("bf16.only.losses", std::pow(norm(error), 2) / (double)target->cols);
    }
}
struct Cast {
    float scale;
    vector<int> bits;
    Floats decoded;
    Cast(const Floats& x, const Fp8& format, float s) : scale(s) {
        for (float value : x) bits.push_back(format.encode(value * scale));
        for (int byte : bits) decoded.push_back(format.decode(byte));
    }
};
struct DelayedScale {  // with algorithm max
    Fp8 format;
    size_t length;
    int margin;
    float scale = 1;
    Floats history = {};
    void add(float magnitude) {
        if (!std::isfinite(magnitude) || magnitude == 0) return;
        history.push_back(magnitude);
        if (history.size() > length) history.erase(history.begin());
        scale = format.scale(amax(history), margin);
    }
};

void note_fp8(Golden& golden) {
    for (const Fp8& format : {E4M3, E5M2, E4M3FNUZ, E5M2FNUZ}) {
        Cast edge(golden.read("fp8.edge." + format.name + ".x"), format, 1);
        golden.note("fp8.edge." + format.name + ".bits", edge.bits);
        golden.note("fp8.edge." + format.name + ".decoded", edge.decoded);
        for (float size : golden.read("fp8.scales.amax")) golden.note("fp8.scales." + format.name, format.scale(size));
    }
    auto dynamic = [&](const Floats& values, const Fp8& format, const string& name) {
        Cast c(values, format, format.scale(amax(values)));
        golden.note(name + ".scale", c.scale);
        golden.note(name + ".bits", c.bits);
        return c;
    };
    const Floats &x = golden.read("fp8.x"), &weight = golden.read("fp8.weight"), &grad = golden.read("fp8.grad");
    Cast x8 = dynamic(x, E4M3, "fp8.x"), w8 = dynamic(weight, E4M3, "fp8.weight");
    Cast g8 = dynamic(grad, E5M2, "fp8.grad");
    dynamic(x, E4M3FNUZ, "fp8.fnuz.x");
    dynamic(grad, E5M2FNUZ, "fp8.fnuz.grad");
    size_t rows = golden.shape("fp8.x")[0], inputs = golden.shape("fp8.x")[1], outputs = golden.shape("fp8.bias")[0];
    M mx = matrix(rows, inputs, x8.decoded), mw = matrix(outputs, inputs, w8.decoded);
    taping = true;
    M y = linear(mx, mw, matrix(1, outputs));
    y->g = g8.decoded;
    backward();
    for (size_t i = 0; i < y->v.size(); i++)
        golden.note("fp8.y", bf16(y->v[i] / x8.scale / w8.scale + golden.read("fp8.bias")[i % outputs]));
    for (float g : mx->g) golden.note("fp8.grad_x", bf16(g / g8.scale / w8.scale));
    for (float g : mw->g) golden.note("fp8.grad_weight", bf16(g / g8.scale / x8.scale));
    Floats sums(outputs);
    for (size_t i = 0; i < rows; i++) add_scaled(sums.data(), 1, &grad[i * outputs], outputs);
    for (float sum : sums) golden.note("fp8.grad_bias", bf16(sum));
    DelayedScale input{E4M3, 3, 1}, gradient{E5M2, 3, 1};
    const Floats &sizes = golden.read("fp8.delayed.amax"), &factors = golden.read("fp8.order.factors");
    for (size_t i = 0; i < sizes.size(); i += 2) {
        input.add(sizes[i]);
        gradient.add(sizes[i + 1]);
        golden.note("fp8.delayed.scale", Floats{input.scale, gradient.scale});
    }
    // The pages do not say it: the first step is dynamic, later ones have a long history and margin 0, and the weight
    // doubles after each step.
    input = {E4M3, 1024, 0}, gradient = {E5M2, 1024, 0};
    for (size_t step = 0; step < factors.size() / 2; step++) {
        const float* factor = &factors[2 * step];
        for (int micro = 0; micro < 2; micro++) {
            float own[2] = {E4M3.scale(amax(x) * factor[micro]), E5M2.scale(amax(grad) * factor[micro])};
            golden.note("fp8.order.scale", Floats{step ? input.scale : own[0], w8.scale / (float)(1 << step),
                                                  step ? gradient.scale : own[1]});
        }
        input.add(amax(x) * std::max(factor[0], factor[1]));
        gradient.add(amax(grad) * std::max(factor[0], factor[1]));
    }
}

void note_ranks(Run& run) {  // the second step at a batch of 4: two ranks of two rows. The pages do not say which step
    Golden& golden = run.golden;
    vector<Net> nets = {run.given_net(), run.given_net()};
    double mean = 0;
    for (Word rank = 0; rank < 2; rank++) {
        mean += run.batch_loss(nets[rank], 4 + 2 * rank, 2, "ranks.") / 2;
        golden.note("ranks.grad_norm_of_rank", note_gradients(golden, nets[rank], "of_rank."));
    }
    for (auto& name : nets[0].names) {
        Floats& g = nets[0].at(name)->g;
        add_all(g, nets[1].at(name)->g);
        for (float& value : g) value /= 2;
    }
    golden.note("ranks.mean_loss", mean);
    golden.note("ranks.grad_norm", note_gradients(golden, nets[0], "ranks.grad."));
}

M full_values(const string& name, size_t rows, size_t cols, double width, float plus = 0) {
    const size_t period = 131071;  // larger weights repeat their numbers and are not stored
    Floats base = uniforms(draw(0, INIT, key_of(name), 0, std::min(period, rows * cols)));
    for (float& value : base) value = (2 * value - 1) * (float)width + plus;
    if (rows * cols <= period) return matrix(rows, cols, base);
    base.insert(base.end(), base.begin(), base.begin() + (std::ptrdiff_t)cols);
    return std::make_shared<Matrix>(Matrix{rows, cols, base, {}, period});
}

void note_full_block(Golden& golden, const string& block, const vector<pair<string, size_t>>& streams) {
    const size_t d = 3072;
    const Json& names = golden.inputs(block + "grad.norms")["names"];
    Net net;
    net.heads = 24, net.rope = rope_table({16, 56, 56}, 4, 2, 4);
    for (auto& item : names.items) {
        auto has = [&](const char* part) { return item.text.find(part) != string::npos; };
        size_t inputs = has("mlp.2") ? 4 * d : has("linear2") ? 5 * d : d, outputs = d;
        outputs *= has("qkv") || has("modulation") ? 3 : has("mlp.0") ? 4 : has("_mod.") ? 6 : has("linear1") ? 7 : 1;
        if (has("scale")) outputs = d / net.heads;
        double width = has("qkv") ? 0x1p-6 : has("weight") ? std::exp2(-std::round(std::log2(inputs) / 2)) : 0.25;
        net.parameters[block + item.text] = has("weight") ? full_values(block + item.text, outputs, inputs, width)
                                            : full_values(block + item.text, 1, outputs, width, has("scale"));
    }
    vector<M> in, out;
    for (auto& [name, tokens] : streams) in.push_back(full_values(block + name, tokens, d, 1));
    auto note = [&](const string& name, const M& m, const Floats& values) {
        for (size_t i = 0; i < m->rows; i++) {
            Floats row(&values[i * d], &values[i * d] + d);
            golden.note(block + name + ".size", norm(row));
            row.resize(8);
            golden.note(block + name, row);
        }
    };
    taping = true;
    out = in;
    if (streams.size() == 3) net.double_block(block, out[0], out[1], silu(in[2]));
    else net.single_block(block, out[0], silu(in[1]));
    for (size_t s = 0; s + 1 < streams.size(); s++) {
        note(streams[s].first, out[s], out[s]->v);
        out[s]->g = full_values(block + streams[s].first + ".grad", streams[s].second, d, 1)->v;
    }
    backward();
    for (size_t s = 0; s < streams.size(); s++) note("grad." + streams[s].first, in[s], in[s]->g);
    for (auto& item : names.items) {
        M p = net.at(block + item.text);
        golden.note(block + "grad.norms", p->period ? std::sqrt(p->grad_square) : norm(p->g));
    }
}

void note_full(Golden& golden) {
    Rope table = rope_table({16, 56, 56}, 256, 16, 16);
    for (auto& token : golden.inputs("full.rope")["tokens"].items)
        for (size_t p = 0; p < 64; p++) golden.note("full.rope", table[token.word() * 64 + p]);
    for (size_t p = 0; p < 64; p++) {
        array<double, 2> sums = {};
        for (size_t at = p; at < table.size(); at += 64) sums = {sums[0] + table[at][0], sums[1] + table[at][1]};
        golden.note("full.rope.sums", sums);
    }
    note_full_block(golden, "full.double.", {{"img", 8}, {"txt", 4}, {"vec", 1}});
    note_full_block(golden, "full.single.", {{"x", 12}, {"vec", 1}});
}

// A line of the benchmark's log. The names of intervals end in _start and _stop. extra is further metadata.
string log_line(const string& key, const string& value, Word time_ms, int lineno, const string& extra = "") {
    string end = key.substr(key.rfind('_') + 1);
    string type = end == "start" ? "INTERVAL_START" : end == "stop" ? "INTERVAL_END" : "POINT_IN_TIME";
    return ":::MLLOG {\"namespace\": \"\", \"time_ms\": " + to_string(time_ms) + ", \"event_type\": \"" + type
           + "\", \"key\": \"" + key + "\", \"value\": " + value
           + ", \"metadata\": {\"file\": \"port.cpp\", \"lineno\": " + to_string(lineno) + extra + "}}";
}

void check_log(const string& path) {  // writes the log of the made-up run in result_0.txt, and compares all but times
    std::istringstream settings(R"(cache_clear true init_start null submission_benchmark "flux1"
        submission_org "flux_ref" submission_division "closed" submission_status "onprem" submission_platform "unknown"
        seed 0 target_accuracy 0.586 global_batch_size 512 gradient_accumulation_steps 1 train_samples 1099776
        eval_samples 29696 evaluation_frequency 262144 opt_name "adamw" opt_base_learning_rate 0.0002
        opt_learning_rate_warmup_steps 1600 opt_adamw_beta_1 0.9 opt_adamw_beta_2 0.95 opt_adamw_epsilon 1e-08
        opt_adamw_weight_decay 0.1 opt_gradient_clip_norm 1.0 lowest_numerical_precision_in_linear "bfloat16"
        lowest_numerical_precision_in_attn "bfloat16" lowest_numerical_precision_in_comm "bfloat16"
        tensor_parallelism 1 pipeline_parallelism 1 context_parallelism 1 expert_parallelism 1 micro_batch_size 64
        config_filename "schnell_gbs512.toml" init_stop null run_start null)");
    vector<string> ours;
    for (string key, value; settings >> key >> value;) ours.push_back(log_line(key, value, 1760000000000, __LINE__));
    for (string key : {"block_start", "block_stop", "eval_start", "eval_accuracy", "eval_stop", "run_stop"}) {
        string extra = string(", \"samples_count\": ") + (key == "block_start" ? "0" : "262144");
        if (key == "run_stop") extra = ", \"status\": \"success\"" + extra + ", \"reason\": \"target reached\"";
        ours.push_back(log_line(key, key == "eval_accuracy" ? "0.586" : "null", 1760000000000, __LINE__, extra));
    }
    std::regex place("\"(time_ms|file|lineno)\": [^,}]*");
    auto bare = [&](const string& line) { return std::regex_replace(line, place, ""); };
    std::istringstream theirs(read_file(path));
    size_t count = 0, equal = 0;
    for (string line; std::getline(theirs, line);)
        if (line.compare(0, 9, ":::MLLOG ") == 0 && count++ < ours.size()) equal += bare(line) == bare(ours[count - 1]);
    std::cout << equal << " of " << count << " lines of " << path << " are as this port writes them\n";
}

int main(int count, char** arguments) try {
    if (count != 3) fail("usage: port GOLDEN_FOLDER OUT.safetensors");
    string folder = arguments[1];
    Golden golden(folder);
    Config config = read_config(folder + "/config.toml");
    Run run(golden, config, folder + "/data");
    for (auto note : {note_draws, note_fp8, note_full}) note(golden);
    for (auto note : {note_data, note_initial, note_steps, note_validation, note_bf16, note_ranks}) note(run);
    check_log(folder + "/result_0.txt");
    golden.write(arguments[2]);
} catch (const std::exception& error) {
    fail(string("a file of the golden folder is damaged or incomplete: ") + error.what());
}
