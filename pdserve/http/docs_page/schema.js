// Texts and examples of JSON schemas of an OpenAPI document. Pure functions.

const MAX_DEPTH = 8;
const nameOf = (ref) => ref.split("/").pop();

/** A short text for the type of a schema, such as `integer ≥ 0 | null`. */
export function typeOf(schema, depth = 0) {
  if (!schema || depth > MAX_DEPTH) return "any";
  if (schema.$ref) return nameOf(schema.$ref);
  const options = schema.anyOf ?? schema.oneOf;
  if (options) return [...new Set(options.map((option) => typeOf(option, depth + 1)))].join(" | ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.type === "array") return `list of ${typeOf(schema.items, depth + 1)}`;
  const type = [schema.type ?? "any"].flat().join(" | ");
  const limits = [];
  if (schema.minimum !== undefined) limits.push(`≥ ${schema.minimum}`);
  if (schema.maximum !== undefined) limits.push(`≤ ${schema.maximum}`);
  return [type, ...limits].join(" ");
}

/** A small value of a schema: the required fields of an object, and those that most requests have. */
export function example(schema, schemas, depth = 0) {
  if (!schema || depth > MAX_DEPTH) return null;
  if (schema.$ref) return example(schemas[nameOf(schema.$ref)], schemas, depth + 1);
  const options = schema.anyOf ?? schema.oneOf;
  if (options) return example(options.find((option) => option.type !== "null"), schemas, depth + 1);
  if (schema.const !== undefined) return schema.const;
  if (schema.enum) return schema.enum[0];
  if (schema.type === "array") return schema.items ? [example(schema.items, schemas, depth + 1)] : [];
  if (schema.properties) {
    const wanted = new Set([...(schema.required ?? []), ...COMMON.filter((name) => schema.properties[name])]);
    return Object.fromEntries([...wanted].map((name) => [name, VALUES[name] ?? example(schema.properties[name], schemas, depth + 1)]));
  }
  return { string: "text", integer: Math.max(0, schema.minimum ?? 0), number: 0, boolean: false, object: {} }[schema.type] ?? null;
}

const COMMON = ["messages", "prompt", "input", "text", "max_tokens", "max_output_tokens"];
const VALUES = { messages: [{ role: "user", content: "Hello" }], role: "user", content: "Hello", prompt: "Hello", input: "Hello", text: "Hello", max_tokens: 16, max_output_tokens: 16 };
