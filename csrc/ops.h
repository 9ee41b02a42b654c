// The operations of programs. pdk.h describes them at the functions that record them; api.cpp makes them.
#pragma once
#include "program.h"

namespace pdk {

struct Embed : Op {
    int64_t out, width;
    const bf16* rows;
    float scale;
    Embed(int64_t out, int64_t width, const bf16* rows, float scale)
        : out(out), width(width), rows(rows), scale(scale) {}
    void run(Program& p, int thread) override;
};

// Embeddings that are the outputs of a packed layer in bf16 or integers, as the weights of a head are.
struct EmbedPacked : Op {
    int64_t out, width;
    Weights weights;
    float scale;
    EmbedPacked(int64_t out, int64_t width, const Weights& weights, float scale)
        : out(out), width(width), weights(weights), scale(scale) {}
    void run(Program& p, int thread) override;
};

struct Angles : Op {
    int64_t group;
    std::vector<float> inverse;
    float factor;
    Angles(int64_t group, const float* inverse, int64_t half, float factor)
        : group(group), inverse(inverse, inverse + half), factor(factor) {}
    void run(Program& p, int thread) override;
};

// Source of a product's inputs. buffer -1: the output of the previous gated product.
struct Source {
    int64_t buffer, width;
    const float* norm;
    float eps;
};

// Act and limit of a gated product.
struct Activation {
    Act act = Act::silu;
    float limit = 0.0f;
};

// `scale`: of what is added, see Output.
struct Product : Op {
    Source source;
    Weights weights;
    int64_t columns, out;
    Store store;
    float scale;
    Activation activation;
    bool of_samples;
    int64_t site = -1;  // number of the layer among those with adapters; -1: it has none
    Product(const Source& source, const Weights& weights, int64_t columns, int64_t out, Store store, float scale,
            const Activation& activation, bool of_samples)
        : source(source), weights(weights), columns(columns), out(out), store(store), scale(scale),
          activation(activation), of_samples(of_samples) {}
    void run(Program& p, int thread) override;
    Soon first_read(Program& p, int thread) const override;

  private:
    void share(Program& p, int thread, int64_t& first, int64_t& last) const;  // in blocks, or pairs of blocks
    // Multiplies blocks [first, last), and adds the changes by the step's adapters.
    void change(Program& p, int thread, const Operand& x, int64_t first, int64_t last, const Output& to) const;
};

struct Norm : Op {
    int64_t in, out;
    const float* weight;
    float eps;
    Norm(int64_t in, int64_t out, const float* weight, float eps) : in(in), out(out), weight(weight), eps(eps) {}
    void run(Program& p, int thread) override;
};

struct Place : Op {
    int64_t group, qkv, layer;
    const float *q_norm, *k_norm;
    float eps;
    bool whole;
    Place(int64_t group, int64_t qkv, int64_t layer, const float* q_norm, const float* k_norm, float eps, bool whole)
        : group(group), qkv(qkv), layer(layer), q_norm(q_norm), k_norm(k_norm), eps(eps), whole(whole) {}
    void run(Program& p, int thread) override;
};

// `selection`: tokens that see more than its top_k attend to those that it has chosen; null: all see all.
struct Attend : Op {
    int64_t group, layer, out;
    Mask mask;
    const Selection* selection;
    Turns turns;
    Attend(int64_t group, int64_t layer, int64_t out, const Mask& mask, const Selection* selection = nullptr)
        : group(group), layer(layer), out(out), mask(mask), selection(selection) {}
    void run(Program& p, int thread) override;
    Soon first_read(Program& p, int thread) const override;
    void prepare_for(Program& p) override { turns.reset(p.pool.size()); }
    bool prepares() const override { return true; }

  private:
    Sight sight() const { return {mask.window, selection ? selection->top_k : 0}; }
    // The number of a piece's query in the selection, or -1.
    int64_t query_of(const Program& p, const Piece& piece) const {
        return selection ? selection->numbers[p.step.offsets[piece.row] + piece.first] : -1;
    }
};

struct Sigmoid : Op {
    int64_t in, gates, first, wide, out;
    bool add;
    Sigmoid(int64_t in, int64_t gates, int64_t first, int64_t wide, int64_t out, bool add)
        : in(in), gates(gates), first(first), wide(wide), out(out), add(add) {}
    void run(Program& p, int thread) override;
};

struct AddRows : Op {
    int64_t in, out;
    const float* norm;
    float eps, scale;
    AddRows(int64_t in, const float* norm, float eps, float scale, int64_t out)
        : in(in), out(out), norm(norm), eps(eps), scale(scale) {}
    void run(Program& p, int thread) override;
};

// Each thread changes the columns that its share of the previous product has just written.
struct Cap : Op {
    int64_t buffer;
    float scale, softcap;
    Cap(int64_t buffer, float scale, float softcap) : buffer(buffer), scale(scale), softcap(softcap) {}
    void run(Program& p, int thread) override;
};

struct Select : Op {
    int64_t in, out;
    Select(int64_t in, int64_t out) : in(in), out(out) {}
    void run(Program& p, int thread) override;
};

// Each thread searches the columns that its share of the previous product has just written.
struct Argmax : Op {
    int64_t in, out;
    std::vector<int64_t> found;  // [threads][samples]
    Argmax(int64_t in, int64_t out) : in(in), out(out) {}
    void run(Program& p, int thread) override;
    void prepare_for(Program& p) override { found.resize(p.pool.size() * p.step.samples); }
    bool prepares() const override { return true; }
};

}  // namespace pdk
