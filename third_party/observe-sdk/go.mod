module github.com/dylibso/observe-sdk/go

go 1.26.0

require github.com/tetratelabs/wazero v1.11.0
