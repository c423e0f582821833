//go:build cgo

package onepassword

// Desktop says whether this build can talk to 1Password's desktop app: the SDK
// loads the app's library, which needs cgo.
const Desktop = true
