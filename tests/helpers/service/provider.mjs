// A real OpenID provider on loopback: node provider.mjs PORT ALGORITHM. Prints "ready" when it listens.
// Its keys are made at the start, so a restart on the same port is a rotation.
import { generateKeyPairSync } from 'node:crypto'
import { createRequire } from 'node:module'
import { pathToFileURL } from 'node:url'

const [port, algorithm] = process.argv.slice(2)
const found = createRequire(`${process.env.LOCUM_TEST_OIDC_PROVIDER}/`).resolve('oidc-provider')
const { Provider } = await import(pathToFileURL(found).href)
const pair = algorithm === 'ES256'
  ? generateKeyPairSync('ec', { namedCurve: 'P-256' })
  : generateKeyPairSync('rsa', { modulusLength: 2048 })
const key = { ...pair.privateKey.export({ format: 'jwk' }), use: 'sig', alg: algorithm, kid: `${process.pid}` }
// The provider signs its ID tokens with RS256 always, so it needs such a key too.
const rsa = generateKeyPairSync('rsa', { modulusLength: 2048 }).privateKey.export({ format: 'jwk' })
const keys = algorithm === 'ES256' ? [key, { ...rsa, use: 'sig', alg: 'RS256', kid: 'identity' }] : [key]
const provider = new Provider(`http://127.0.0.1:${port}`, {
  clients: [{
    client_id: 'pacs',
    client_secret: 'secret',
    grant_types: ['client_credentials'],
    redirect_uris: [],
    response_types: [],
  }],
  jwks: { keys },
  features: {
    clientCredentials: { enabled: true },
    devInteractions: { enabled: false },
    resourceIndicators: {
      enabled: true,
      defaultResource: () => 'urn:locum',
      getResourceServerInfo: () => ({
        scope: '', audience: 'locum', accessTokenTTL: 600, accessTokenFormat: 'jwt', jwt: { sign: { alg: algorithm } },
      }),
    },
  },
  extraTokenClaims: () => ({ sub: 'pacs', locum_roles: ['reader'], locum_hospitals: ['*'] }),
})
provider.listen(Number(port), '127.0.0.1', () => console.log('ready'))
