//go:build cgo

package onepassword

// Desktop reports whether this build can use 1Password's desktop app. The SDK loads
// the app's library, which needs cgo.
const Desktop = true
