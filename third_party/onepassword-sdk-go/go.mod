module github.com/1password/onepassword-sdk-go

go 1.26.0

require (
	github.com/extism/go-sdk v1.7.1
	github.com/klauspost/compress v1.20.3
	github.com/tetratelabs/wazero v1.11.0
	golang.org/x/sys v0.49.0
)
