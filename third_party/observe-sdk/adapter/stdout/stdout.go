// Package stdout exists because tests of a dependency import it, which `go mod tidy`
// follows.
package stdout
