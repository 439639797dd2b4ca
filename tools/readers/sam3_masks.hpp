// Reader of sam3_node's messages of frames and masks, wire version 1, in C++17. Copy this file; link with -lzstd.
//
// parse_masks and parse_frame take the parts of a ZeroMQ message; decode_mask gives a mask's pixels. Other or damaged
// data throw sam3::Error. Text and bytes in the results are views of the parts: keep these. Licence: Apache-2.0.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

extern "C" {  // of zstd.h
size_t ZSTD_decompress(void*, size_t, const void*, size_t);
unsigned long long ZSTD_getFrameContentSize(const void*, size_t);
unsigned ZSTD_isError(size_t);
}

namespace sam3 {
struct Error : std::runtime_error { using std::runtime_error::runtime_error; };
inline void require(bool holds, const char* expected) { if (!holds) throw Error(std::string("expected ") + expected); }

// MessagePack

struct Value {
    enum Kind { Nil, Bool, Integer, Number, Text, Bytes, List, Map } kind = Nil;
    int64_t integer = 0;  // also of Bool
    double number = 0;    // also of Integer
    std::string_view data;
    std::vector<Value> items;  // of a Map: keys and values in turn

    const Value* find(std::string_view key) const {
        for (size_t i = 0; kind == Map && i + 1 < items.size(); i += 2)
            if (items[i].kind == Text && items[i].data == key && items[i + 1].kind != Nil) return &items[i + 1];
        return nullptr;
    }
    const Value& at(const char* key) const {
        if (const Value* value = find(key)) return *value;
        throw Error(std::string("expected the key ") + key);
    }
    int64_t to_integer() const { require(kind == Integer, "an integer"); return integer; }
    double to_number() const { require(kind == Integer || kind == Number, "a number"); return number; }
    bool to_bool() const { require(kind == Bool, "true or false"); return integer != 0; }
    std::string_view text_or(const char* key, std::string_view other) const {
        return find(key) ? at(key).to_text() : other;
    }
    std::string_view to_text() const { require(kind == Text, "text"); return data; }
    const std::vector<Value>& to_list() const { require(kind == List, "a list"); return items; }
    std::string_view to_bytes() const { require(kind == Bytes, "bytes"); return data; }
};

class Unpacker {
public:
    static Value unpack(std::string_view data) {
        Unpacker unpacker{data};
        Value value = unpacker.value(0);
        require(unpacker.data_.empty(), "one MessagePack object, found more bytes");
        return value;
    }

private:
    explicit Unpacker(std::string_view data) : data_(data) {}
    std::string_view take(uint64_t count) {
        require(count <= data_.size(), "MessagePack, found its end too early");
        data_.remove_prefix(count);
        return {data_.data() - count, count};
    }
    uint64_t big_endian(int bytes) {
        uint64_t value = 0;
        for (unsigned char byte : take(bytes)) value = value << 8 | byte;
        return value;
    }
    static Value make_integer(int64_t integer) { return {Value::Integer, integer, double(integer), {}, {}}; }
    template <typename Float, typename Bits> static Value make_number(Bits bits) {
        Float number;
        std::memcpy(&number, &bits, sizeof bits);
        return {Value::Number, 0, number, {}, {}};
    }
    Value make_data(Value::Kind kind, uint64_t count) { return {kind, 0, 0, take(count), {}}; }
    Value make_items(Value::Kind kind, uint64_t count, int depth) {
        Value value{kind, 0, 0, {}, {}};
        for (uint64_t i = 0; i < count; i++) value.items.push_back(this->value(depth + 1));
        return value;
    }
    Value value(int depth) {
        require(depth < 32, "MessagePack of at most 32 levels");
        const unsigned head = static_cast<unsigned char>(take(1)[0]);
        if (head < 0x80) return make_integer(head);
        if (head >= 0xe0) return make_integer(int(head) - 256);
        if (head < 0x90) return make_items(Value::Map, 2 * (head & 15), depth);
        if (head < 0xa0) return make_items(Value::List, head & 15, depth);
        if (head < 0xc0) return make_data(Value::Text, head & 31);
        switch (head) {
            case 0xc0: return {};
            case 0xc2: case 0xc3: return {Value::Bool, head == 0xc3, 0, {}, {}};
            case 0xc4: case 0xc5: case 0xc6: return make_data(Value::Bytes, big_endian(1 << (head - 0xc4)));
            case 0xca: return make_number<float>(uint32_t(big_endian(4)));
            case 0xcb: return make_number<double>(big_endian(8));
            case 0xcc: case 0xcd: case 0xce: case 0xcf: return make_integer(int64_t(big_endian(1 << (head - 0xcc))));
            case 0xd0: return make_integer(int8_t(big_endian(1)));
            case 0xd1: return make_integer(int16_t(big_endian(2)));
            case 0xd2: return make_integer(int32_t(big_endian(4)));
            case 0xd3: return make_integer(int64_t(big_endian(8)));
            case 0xd9: case 0xda: case 0xdb: return make_data(Value::Text, big_endian(1 << (head - 0xd9)));
            case 0xdc: case 0xdd: return make_items(Value::List, big_endian(2 << (head - 0xdc)), depth);
            case 0xde: case 0xdf: return make_items(Value::Map, 2 * big_endian(2 << (head - 0xde)), depth);
            default: throw Error("expected MessagePack without extensions");
        }
    }
    std::string_view data_;
};

template <size_t N> std::array<int64_t, N> integers(const Value& list) {
    require(list.to_list().size() == N, "a list of another length");
    std::array<int64_t, N> found;
    for (size_t i = 0; i < N; i++) found[i] = list.items[i].to_integer();
    return found;
}

// Masks

struct Mask { std::string_view encoding, data; int64_t height, width; std::array<int64_t, 4> box; };
struct Instance {
    int64_t id, area, age, frames_since_seen;
    std::string_view label, state;
    double score;
    std::optional<double> confidence;
    bool doubtful;
    std::array<int64_t, 4> box;
    Mask mask;
    Value fields;  // all of them, with the optional ones: position_m and others
};

struct MaskMessage {
    std::string_view camera, clock, node, model;
    int64_t seq, capture_ns, received_ns, published_ns, width, height, skipped;
    std::optional<int64_t> epoch;  // ids begin again with another one
    std::vector<Instance> instances;
};

inline Value unpack_body(const std::vector<std::string_view>& parts, const char* root, const char* kind) {
    require(parts.size() >= 2, "a topic and a body");
    Value body = Unpacker::unpack(parts[1]);
    require(body.at("v").to_integer() == 1 && body.at("kind").to_text() == kind, "another kind or version of message");
    require(parts[0] == root + std::string(body.at("camera").to_text()), "the topic of the camera");
    return body;
}

inline Mask parse_mask(const Value& map) {
    auto [height, width] = integers<2>(map.at("size"));
    Mask mask{map.at("encoding").to_text(), map.at("data").to_bytes(), height, width, integers<4>(map.at("box"))};
    auto [x0, y0, x1, y1] = mask.box;
    require(height > 0 && width > 0 && height <= 16384 && width <= 16384, "a mask of 1 to 16384 pixels a side");
    require(0 <= x0 && x0 <= x1 && x1 <= width && 0 <= y0 && y0 <= y1 && y1 <= height, "a box inside the mask");
    return mask;
}

inline Instance parse_instance(Value map) {
    const Value *confidence = map.find("confidence"), *doubtful = map.find("doubtful");
    Instance instance{map.at("id").to_integer(), map.at("area").to_integer(), map.at("age").to_integer(),
                      map.at("frames_since_seen").to_integer(), map.at("label").to_text(), map.at("state").to_text(),
                      map.at("score").to_number(), {}, doubtful && doubtful->to_bool(), integers<4>(map.at("box")),
                      parse_mask(map.at("mask")), {}};
    if (confidence) instance.confidence = confidence->to_number();
    instance.fields = std::move(map);
    return instance;
}

inline MaskMessage parse_masks(const std::vector<std::string_view>& parts) {
    Value body = unpack_body(parts, "masks/", "masks");
    MaskMessage message{body.at("camera").to_text(), body.text_or("clock", "system"), body.text_or("node", ""),
                        body.at("model").to_text(), body.at("seq").to_integer(), body.at("capture_ns").to_integer(),
                        body.at("received_ns").to_integer(), body.at("published_ns").to_integer(),
                        body.at("width").to_integer(), body.at("height").to_integer(), body.at("skipped").to_integer(),
                        {}, {}};
    if (const Value* epoch = body.find("epoch")) message.epoch = epoch->to_integer();
    for (const Value& instance : body.at("instances").to_list()) message.instances.push_back(parse_instance(instance));
    return message;
}

// Returns the pixels of a mask, row after row: 1 inside, 0 outside.
inline std::vector<uint8_t> decode_mask(const Mask& mask) {
    std::vector<uint8_t> pixels(size_t(mask.height * mask.width), 0);
    auto [x0, y0, x1, y1] = mask.box;
    const size_t width = size_t(x1 - x0), count = width * size_t(y1 - y0);
    if (mask.encoding == "bits+zstd") {
        if (mask.data.empty() && count == 0) return pixels;
        std::vector<uint8_t> bits((count + 7) / 8);
        require(ZSTD_getFrameContentSize(mask.data.data(), mask.data.size()) == bits.size(), "bits of the box's size");
        const size_t size = ZSTD_decompress(bits.data(), bits.size(), mask.data.data(), mask.data.size());
        require(!ZSTD_isError(size) && size == bits.size(), "one whole zstd frame");
        for (size_t i = 0; i < count; i++) {
            const size_t row = size_t(y0) + i / width, column = size_t(x0) + i % width;
            pixels[row * size_t(mask.width) + column] = bits[i / 8] >> (7 - i % 8) & 1;
        }
        return pixels;
    }
    require(mask.encoding == "rle", "bits+zstd or rle");
    std::vector<int64_t> counts;
    int64_t place = 0;
    const int64_t total = mask.height * mask.width;
    for (size_t i = 0; i < mask.data.size();) {
        int64_t value = 0;
        int shift = 0, byte = 0x20;
        for (; byte & 0x20; shift += 5) {
            require(i < mask.data.size() && shift < 40, "whole counts of rle");
            byte = mask.data[i++] - 48;
            require(0 <= byte && byte < 64, "rle of the bytes 48 to 111");
            value |= int64_t(byte & 31) << shift;
        }
        if (byte & 16) value -= int64_t(1) << shift;
        if (counts.size() > 2) value += counts[counts.size() - 2];
        require(0 <= value && value <= total - place, "counts of rle up to the mask's size");
        for (const int64_t end = place + value; place < end; place++)  // down the columns
            pixels[size_t(place % mask.height * mask.width + place / mask.height)] = counts.size() % 2;
        counts.push_back(value);
    }
    require(place == total, "counts of rle of the mask's size");
    return pixels;
}

// Frames

struct Depth { int64_t width, height; std::string_view encoding, data; double scale_m; bool aligned; };

struct Frame {
    std::string_view camera, clock, encoding, colour;
    int64_t seq, capture_ns, sent_ns, width, height;
    std::optional<Depth> depth;
    Value header;  // with intrinsics and times
};

inline Frame parse_frame(const std::vector<std::string_view>& parts) {
    Value header = unpack_body(parts, "frame/", "frame");
    require(parts.size() == (header.find("depth") ? 4 : 3), "a part for each image");
    Frame frame{header.at("camera").to_text(), header.at("clock").to_text(), header.at("encoding").to_text(), parts[2],
                header.at("seq").to_integer(), header.at("capture_ns").to_integer(), header.at("sent_ns").to_integer(),
                header.at("width").to_integer(), header.at("height").to_integer(), {}, {}};
    if (const Value* depth = header.find("depth"))
        frame.depth = Depth{depth->at("width").to_integer(), depth->at("height").to_integer(),
                            depth->at("encoding").to_text(), parts[3], depth->at("scale_m").to_number(),
                            depth->at("aligned").to_bool()};
    frame.header = std::move(header);
    return frame;
}
}  // namespace sam3
