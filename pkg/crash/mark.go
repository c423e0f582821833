package crash

// Mark is the name of a place that something is written at.
type Mark string

// The marks: before and after a transaction of the store is committed, and before
// and after a file gets its content or its name.
const (
	BeforeCommit Mark = "before-commit"
	AfterCommit  Mark = "after-commit"
	BeforeFile   Mark = "before-file"
	AfterFile    Mark = "after-file"
)
