// The Vercel AI SDK's calls: `node clients_run.mjs BASE_URL MODEL`, where it is installed; a JSON line out.
import { readFileSync } from 'node:fs'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { generateObject, generateText, jsonSchema, streamText, tool } from 'ai'

const [baseURL, name] = process.argv.slice(2)
const model = createOpenAICompatible({ name: 'quire', baseURL, supportsStructuredOutputs: true })(name)
const prompt = 'Ann, 3, lives in Oslo.'
const words = { type: 'string', maxLength: 6 }
const object = (properties) =>
  ({ type: 'object', properties, required: Object.keys(properties), additionalProperties: false })
const person = jsonSchema(object({
  name: words,
  age: { type: 'integer', minimum: 0, maximum: 99 },
  address: object({ street: words, city: words }),
}))
const ask = { model, prompt, temperature: 0, maxRetries: 0 }
const tools = { save: tool({ description: 'Saves a person.', inputSchema: person }) }

function check(isSo, got) {
  if (!isSo) throw new Error(`unexpected: ${JSON.stringify(got)}`)
}
const isPerson = (one) => Number.isInteger(one?.age) && typeof one.address?.city === 'string'

const parts = {
  async plain() {
    const { text } = await generateText({ ...ask, maxOutputTokens: 24 })
    check(text, text)
  },
  async streamed() {
    const { text } = await generateText({ ...ask, maxOutputTokens: 24 })
    let streamed = ''
    for await (const part of streamText({ ...ask, maxOutputTokens: 24 }).textStream) streamed += part
    check(streamed === text, [streamed, text])
  },
  async 'tools required'() {
    const { toolCalls } = await generateText({ ...ask, maxOutputTokens: 400, tools, toolChoice: 'required' })
    check(toolCalls.length === 1 && isPerson(toolCalls[0].input), toolCalls)
  },
  async 'tools streamed'() {
    const calls = await streamText({ ...ask, maxOutputTokens: 400, tools, toolChoice: 'required' }).toolCalls
    check(calls.length === 1 && isPerson(calls[0].input), calls)
  },
  async 'structured output'() {
    const answer = await generateObject({ ...ask, maxOutputTokens: 400, schema: person })
    check(isPerson(answer.object), answer.object)
  },
}

const did = {}
for (const [part, run] of Object.entries(parts)) {
  try {
    await run()
    did[part] = 'ok'
  } catch (error) {
    did[part] = `${error.name}: ${error.message}`.slice(0, 500)
  }
}
const { version } = JSON.parse(readFileSync(new URL('node_modules/ai/package.json', import.meta.url)))
console.log(JSON.stringify({ package: 'ai', version, did }))
