// SPDX-License-Identifier: Apache-2.0

package quota

// Every code that any part of gpufence gives to a user. Numbers are never used again for
// something else. docs/errors.md says the same at length; a test compares the two.
//
//	E10xx  wrapper and hook: config.json, bundle, low-level runtime
//	E12xx  values
//	E13xx  keys
//	E14xx  admission, capacity, resize
//	E15xx  gpufenced and node policy
//	E16xx  cgroups
//	E17xx  devices and delivery
//	E18xx  configuration of the engines
const (
	CodeSpecUnreadable Code = "E1001" // config.json cannot be read
	CodeSpecInvalid    Code = "E1002" // config.json is not what the OCI says
	CodeSpecTooLarge   Code = "E1003" // config.json is larger than the bound
	CodeNotABundle     Code = "E1004" // no config.json where the bundle should be
	CodeSpecUnwritable Code = "E1005" // the edited config.json cannot be written
	CodeNoRuntime      Code = "E1006" // none of the low-level runtimes exists
	CodeRuntimeExec    Code = "E1007" // the low-level runtime cannot be executed, or is we ourselves
	CodeUsage          Code = "E1008" // a command line that cannot be understood
	CodeHookState      Code = "E1009" // the hook's state on stdin cannot be understood
	CodeRootless       Code = "E1010" // not root: rootful engines only
	CodeRunFailed      Code = "E1011" // gpufence run cannot make a namespace for its command
	CodeInternal       Code = "E1099" // a bug of ours

	CodeBadQuantity    Code = "E1201" // not a quantity at all
	CodeBadUnit        Code = "E1202" // a unit that does not exist, or not for bytes
	CodeNoUnit         Code = "E1203" // a number without a unit
	CodeFraction       Code = "E1204" // a fraction of a byte
	CodeNegative       Code = "E1205" // below 0
	CodeTooBig         Code = "E1206" // does not fit into 63 bits, or too long to be a value
	CodeBadPercent     Code = "E1207" // not between 0% and 100%
	CodeBadList        Code = "E1208" // a per-GPU list that is wrong or names a GPU twice
	CodeListPosition   Code = "E1209" // a position in a per-GPU list under Kubernetes
	CodeListNoSuchGPU  Code = "E1210" // a listed GPU that the container does not have
	CodeBelowContext   Code = "E1211" // memory.max smaller than a context
	CodeAboveGPU       Code = "E1212" // more than the GPU has
	CodeAboveCeiling   Code = "E1213" // more than node policy allows
	CodeMinAboveMax    Code = "E1214" // memory.min > memory.max
	CodeBadBool        Code = "E1215" // not true or false
	CodeBadRequire     Code = "E1216" // not hard or reactive
	CodeBadGPUSelector Code = "E1217" // the gpu key's value
	CodeEnvRaises      Code = "E1218" // env above the node's default
	CodeBadShare       Code = "E1219" // 1/N outside node policy, or N not sensible

	CodeUnknownKey        Code = "E1301" // a key in our domain that we do not know
	CodeDuplicateKey      Code = "E1302" // one value named twice
	CodeBadConfigYAML     Code = "E1303" // gpufence.dev/config is not what it should be
	CodeStatusKey         Code = "E1304" // status.* set by a user
	CodeNotEnforced       Code = "E1305" // a key that this version does not enforce
	CodeNotAccepted       Code = "E1306" // a key that node policy does not accept from this engine
	CodeContainerKeyNoGPU Code = "E1307" // a container key on a container without a GPU
	CodeKeyNoGPU          Code = "E1308" // outside Kubernetes: a key without a GPU
	CodeContainerScope    Code = "E1309" // container.<name> where containers have no name
	CodeAliasConflict     Code = "E1310" // two aliases disagree
	CodeNotSettable       Code = "E1311" // gpufence set: a key that cannot change while the container runs
	CodeNoSuchName        Code = "E1312" // a key for a container that the pod does not have

	CodeNoLimit         Code = "E1401" // a container with a GPU and no limit, under deny
	CodeUnavailable     Code = "E1402" // GPUMemoryUnavailable: memory.min more than is free
	CodeGPUUnknown      Code = "E1403" // no trustworthy data on a GPU: no new starts
	CodeNoSuchGPU       Code = "E1404" // a GPU that this node does not have
	CodeMaxUnderCeiling Code = "E1405" // `max` where a ceiling is set
	CodeLevelNotReached Code = "E1406" // require is above what the node's fences reach
	CodeResizeFailed    Code = "E1407" // a shrink that did not end by its deadline
	CodeNoSuchContainer Code = "E1408" // nothing is registered under that name
	CodeAmbiguousName   Code = "E1409" // several are
	CodeNotRunning      Code = "E1410" // the container has ended, or has not started
	CodeNamespaceTotal  Code = "E1411" // the namespace's total of memory.min
	CodeUnmanaged       Code = "E1412" // GPU use that did not come through gpufence, which policy denies

	CodeUnreachable     Code = "E1501" // gpufenced does not answer
	CodeBadAnswer       Code = "E1502" // gpufenced's answer cannot be understood
	CodeBadPolicy       Code = "E1503" // config.toml is wrong
	CodePolicyUnread    Code = "E1504" // config.toml cannot be read
	CodePolicyUnbuilt   Code = "E1505" // config.toml asks for what this version does not enforce
	CodeForbidden       Code = "E1506" // the caller may not
	CodeBadRequest      Code = "E1507" // a request to gpufenced that cannot be understood
	CodeNotPrepared     Code = "E1508" // register without prepare
	CodeAlreadyRunning  Code = "E1509" // another gpufenced holds the run directory
	CodeStateDamaged    Code = "E1510" // state below the run directory cannot be used
	CodeNVMLUnavailable Code = "E1511" // NVML cannot be loaded or initialised
	CodeQuiesced        Code = "E1512" // gpufence quiesce: no container starts until gpufence resume
	CodeBusy            Code = "E1513" // too many ask gpufenced at one time
	CodeNoSuchEvent     Code = "E1514" // no event has that number, or it is not kept any more
	CodeBadManifest     Code = "E1515" // a manifest that gpufence apply cannot understand
	CodeBundle          Code = "E1516" // gpufence support-bundle cannot write its file
	CodeCanary          Code = "E1517" // a canary container was not held
	CodeKubectl         Code = "E1518" // kubectl gpufence cannot reach the node

	CodeCgroupRoot     Code = "E1601" // the container is in the root cgroup
	CodeCgroupShared   Code = "E1602" // its cgroup holds other processes
	CodeCgroupOwn      Code = "E1603" // its cgroup is ours or the runtime's
	CodeCgroupDisabled Code = "E1604" // it has no cgroup that can be found
	CodeProcessGone    Code = "E1605" // its first process is gone

	CodeNoInjector     Code = "E1701" // nothing here can inject GPUs
	CodeForeignPreload Code = "E1702" // HAMi's preload is in the container
	CodePrivileged     Code = "E1703" // it could switch the fences off
	CodeNoCDIDevice    Code = "E1704" // a CDI name that no specification has
	CodeShimMissing    Code = "E1705" // libgpufence.so is not where it should be
	CodePages          Code = "E1706" // the shared pages cannot be made
	CodePreloadFile    Code = "E1707" // the image's /etc/ld.so.preload cannot be kept
	CodeMountConflict  Code = "E1708" // something else is mounted where our files go

	CodeEngineUnread     Code = "E1801" // the engine's configuration cannot be read
	CodeEngineBroken     Code = "E1802" // the engine's configuration is not what the engine takes
	CodeEngineForm       Code = "E1803" // a form of configuration that gpufence does not write
	CodeEngineRefused    Code = "E1804" // the engine's own loader refuses the result
	CodeEngineUnwritable Code = "E1805" // the engine's configuration cannot be written
	CodeEngineTaken      Code = "E1806" // the name or the file belongs to somebody else
	CodeEngineNoWrap     Code = "E1807" // no runtime of that name to wrap
	CodeEngineInUse      Code = "E1808" // containers use the runtime
	CodeEngineRestart    Code = "E1809" // the engine could not be restarted
	CodeEngineNoCRI      Code = "E1810" // containerd's CRI plugin is switched off
	CodeEngineGenerated  Code = "E1811" // the file is written anew by somebody else
	CodeEnginePrograms   Code = "E1812" // gpufence's own programs cannot be put in place
)

// CodeInfo is a line of the table of codes.
type CodeInfo struct {
	Code  Code
	Title string // what is wrong, as a heading
}

// Codes lists every code in the order of its number.
func Codes() []CodeInfo {
	return []CodeInfo{
		{CodeSpecUnreadable, "config.json cannot be read"},
		{CodeSpecInvalid, "config.json is not what the OCI says"},
		{CodeSpecTooLarge, "config.json is larger than the bound"},
		{CodeNotABundle, "no config.json where the bundle should be"},
		{CodeSpecUnwritable, "the edited config.json cannot be written"},
		{CodeNoRuntime, "none of the low-level runtimes exists"},
		{CodeRuntimeExec, "the low-level runtime cannot be executed, or is we ourselves"},
		{CodeUsage, "a command line that cannot be understood"},
		{CodeHookState, "the hook's state on stdin cannot be understood"},
		{CodeRootless, "not root: rootful engines only"},
		{CodeRunFailed, "gpufence run cannot make a namespace for its command"},
		{CodeInternal, "a bug of ours"},
		{CodeBadQuantity, "not a quantity at all"},
		{CodeBadUnit, "a unit that does not exist, or not for bytes"},
		{CodeNoUnit, "a number without a unit"},
		{CodeFraction, "a fraction of a byte"},
		{CodeNegative, "below 0"},
		{CodeTooBig, "does not fit into 63 bits, or too long to be a value"},
		{CodeBadPercent, "not between 0% and 100%"},
		{CodeBadList, "a per-GPU list that is wrong or names a GPU twice"},
		{CodeListPosition, "a position in a per-GPU list under Kubernetes"},
		{CodeListNoSuchGPU, "a listed GPU that the container does not have"},
		{CodeBelowContext, "memory.max smaller than a context"},
		{CodeAboveGPU, "more than the GPU has"},
		{CodeAboveCeiling, "more than node policy allows"},
		{CodeMinAboveMax, "memory.min > memory.max"},
		{CodeBadBool, "not true or false"},
		{CodeBadRequire, "not hard or reactive"},
		{CodeBadGPUSelector, "the gpu key's value"},
		{CodeEnvRaises, "env above the node's default"},
		{CodeBadShare, "1/N outside node policy, or N not sensible"},
		{CodeUnknownKey, "a key in our domain that we do not know"},
		{CodeDuplicateKey, "one value named twice"},
		{CodeBadConfigYAML, "gpufence.dev/config is not what it should be"},
		{CodeStatusKey, "status.* set by a user"},
		{CodeNotEnforced, "a key that this version does not enforce"},
		{CodeNotAccepted, "a key that node policy does not accept from this engine"},
		{CodeContainerKeyNoGPU, "a container key on a container without a GPU"},
		{CodeKeyNoGPU, "outside Kubernetes: a key without a GPU"},
		{CodeContainerScope, "container.<name> where containers have no name"},
		{CodeAliasConflict, "two aliases disagree"},
		{CodeNotSettable, "gpufence set: a key that cannot change while the container runs"},
		{CodeNoSuchName, "a key for a container that the pod does not have"},
		{CodeNoLimit, "a container with a GPU and no limit, under deny"},
		{CodeUnavailable, "GPUMemoryUnavailable: memory.min more than is free"},
		{CodeGPUUnknown, "no trustworthy data on a GPU: no new starts"},
		{CodeNoSuchGPU, "a GPU that this node does not have"},
		{CodeMaxUnderCeiling, "`max` where a ceiling is set"},
		{CodeLevelNotReached, "require is above what the node's fences reach"},
		{CodeResizeFailed, "a shrink that did not end by its deadline"},
		{CodeNoSuchContainer, "nothing is registered under that name"},
		{CodeAmbiguousName, "several are"},
		{CodeNotRunning, "the container has ended, or has not started"},
		{CodeNamespaceTotal, "the namespace's total of memory.min"},
		{CodeUnmanaged, "GPU use that did not come through gpufence, which policy denies"},
		{CodeUnreachable, "gpufenced does not answer"},
		{CodeBadAnswer, "gpufenced's answer cannot be understood"},
		{CodeBadPolicy, "config.toml is wrong"},
		{CodePolicyUnread, "config.toml cannot be read"},
		{CodePolicyUnbuilt, "config.toml asks for what this version does not enforce"},
		{CodeForbidden, "the caller may not"},
		{CodeBadRequest, "a request to gpufenced that cannot be understood"},
		{CodeNotPrepared, "register without prepare"},
		{CodeAlreadyRunning, "another gpufenced holds the run directory"},
		{CodeStateDamaged, "state below the run directory cannot be used"},
		{CodeNVMLUnavailable, "NVML cannot be loaded or initialised"},
		{CodeQuiesced, "gpufence quiesce: no container starts until gpufence resume"},
		{CodeBusy, "too many ask gpufenced at one time"},
		{CodeNoSuchEvent, "no event has that number, or it is not kept any more"},
		{CodeBadManifest, "a manifest that gpufence apply cannot understand"},
		{CodeBundle, "gpufence support-bundle cannot write its file"},
		{CodeCanary, "a canary container was not held"},
		{CodeKubectl, "kubectl gpufence cannot reach the node"},
		{CodeCgroupRoot, "the container is in the root cgroup"},
		{CodeCgroupShared, "its cgroup holds other processes"},
		{CodeCgroupOwn, "its cgroup is ours or the runtime's"},
		{CodeCgroupDisabled, "it has no cgroup that can be found"},
		{CodeProcessGone, "its first process is gone"},
		{CodeNoInjector, "nothing here can inject GPUs"},
		{CodeForeignPreload, "HAMi's preload is in the container"},
		{CodePrivileged, "it could switch the fences off"},
		{CodeNoCDIDevice, "a CDI name that no specification has"},
		{CodeShimMissing, "libgpufence.so is not where it should be"},
		{CodePages, "the shared pages cannot be made"},
		{CodePreloadFile, "the image's /etc/ld.so.preload cannot be kept"},
		{CodeMountConflict, "something else is mounted where our files go"},
		{CodeEngineUnread, "the engine's configuration cannot be read"},
		{CodeEngineBroken, "the engine's configuration is not what the engine takes"},
		{CodeEngineForm, "a form of configuration that gpufence does not write"},
		{CodeEngineRefused, "the engine's own loader refuses the result"},
		{CodeEngineUnwritable, "the engine's configuration cannot be written"},
		{CodeEngineTaken, "the name or the file belongs to somebody else"},
		{CodeEngineNoWrap, "no runtime of that name to wrap"},
		{CodeEngineInUse, "containers use the runtime"},
		{CodeEngineRestart, "the engine could not be restarted"},
		{CodeEngineNoCRI, "containerd's CRI plugin is switched off"},
		{CodeEngineGenerated, "the file is written anew by somebody else"},
		{CodeEnginePrograms, "gpufence's own programs cannot be put in place"},
	}
}
